"""Statistics of a Reducer's passes: their times, the used parameters, and the attached logger.

Contract: this module neither changes a pass nor waits for a rank. The Reducer records the moments
of a pass in `_watch`, and calls `_ended` after the pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from nc10d.ops import Array
from nc10d.reducer.hooks.grad_bucket import CommHook
from nc10d.reducer.plan import Spec
from nc10d.reducer.timing import Moment, PassTimes, Stopwatch, TimingRecorder
from nc10d.reducer.used_parameters import UsedParameters


class PassObserver(Protocol):
    """An object that the Reducer notifies of each pass, such as a Logger."""

    def pass_ended(self) -> None:
        """Handle the end of a pass, in the thread that finishes it."""


class PassStats:
    """The part of a Reducer that reports statistics; `passes` counts the finished passes."""

    _hook: tuple[CommHook, object] | None

    def __init__(self, params: Sequence[Array], specs: Sequence[Spec]) -> None:
        self.passes = 0
        self._used_parameters = UsedParameters(len(specs))
        self._watch = Stopwatch(len(specs), _device_timer(params, specs))
        self._logger: weakref.ref[PassObserver] | None = None

    def set_logger(self, logger: PassObserver) -> None:
        """Notify a logger of each pass; the Reducer does not keep it alive."""
        self._logger = weakref.ref(logger)

    def prepare_for_forward(self) -> None:
        """Record the start of a forward pass, for the times of the next pass only."""
        self._watch.record(Moment.FORWARD_START)

    @property
    def hook_name(self) -> str:
        """The name of the registered comm hook; empty without a hook."""
        return "" if self._hook is None else getattr(self._hook[0], "__qualname__", "a hook")

    @property
    def used(self) -> list[bool]:
        """For each parameter, whether any rank used it up to the end of the last finished pass.

        Without `find_unused_parameters` all are True.
        """
        return list(self._used_parameters.used)

    @property
    def times(self) -> PassTimes:
        """The moments of the last finished pass, on the host's clock."""
        return self._watch.last

    def durations(self) -> dict[str, int]:
        """Return the duration of each part of the last pass in ns, by c10d's names.

        If all parameters are on a single CUDA device, events on its current stream measure the
        durations. The call then blocks until the device has finished the pass, and is valid until
        the next pass begins.
        """
        return self._watch.durations()

    def get_backward_stats(self) -> list[int]:
        """Return when each gradient of the last pass was ready, in ns since the pass began."""
        return list(self.times.ready)

    def _ended(self, began: int, ready: Sequence[int], first_launch: int) -> None:
        """Record the end of a pass and notify the logger; see `Stopwatch.ended`."""
        self._watch.ended(began, ready, first_launch)
        self.passes += 1
        logger = self._logger and self._logger()
        if logger:
            logger.pass_ended()


def _device_timer(params: Sequence[Array], specs: Sequence[Spec]) -> TimingRecorder | None:
    """Return a timer on the device if all parameters are on a single CUDA device, else None."""
    devices = {spec.device for spec in specs}
    if len(devices) != 1 or not devices.pop().startswith("cuda"):
        return None
    from nc10d.reducer.device_timing import DeviceTimer

    return DeviceTimer(params[0])
