"""What can be seen of a Reducer's passes: their times, what they used, and a logger that looks on.

Contract: nothing here changes a pass or waits for a rank. A Reducer tells `_watch` of the moments
of a pass, and `_ended` that one is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nc10d.ops import Array
from nc10d.reducer.hooks import CommHook
from nc10d.reducer.plan import Spec
from nc10d.reducer.timing import Moment, PassTimes, Stopwatch, TimingRecorder
from nc10d.reducer.used_parameters import UsedParameters

if TYPE_CHECKING:
    from nc10d.reducer.logger import Logger


class PassStats:
    """The part of a Reducer of `params` that tells of its passes.

    `passes` is how many were finished.
    """

    _hook: tuple[CommHook, object] | None

    def __init__(self, params: Sequence[Array], specs: Sequence[Spec]) -> None:
        self.passes = 0
        self._usage = UsedParameters(len(specs))
        self._watch = Stopwatch(len(specs), _device_timer(params, specs))
        self._logger: weakref.ref[Logger] | None = None

    def set_logger(self, logger: Logger) -> None:
        """Let a logger see the passes; it is not kept alive."""
        self._logger = weakref.ref(logger)

    def prepare_for_forward(self) -> None:
        """Take note that a forward pass begins: for the times of the next pass alone."""
        self._watch.record(Moment.FORWARD_START)

    @property
    def hook_name(self) -> str:
        """The name of the registered comm hook; empty if there is none."""
        return "" if self._hook is None else getattr(self._hook[0], "__qualname__", "a hook")

    @property
    def used(self) -> list[bool]:
        """Whether any rank used a parameter up to the end of the last pass that was finished.

        All are, without `find_unused_parameters`.
        """
        return list(self._usage.used)

    @property
    def times(self) -> PassTimes:
        """When the parts of the last pass that was finished happened, as the host saw it."""
        return self._watch.last

    def durations(self) -> dict[str, int]:
        """Return how long the parts of the last pass took, in ns, by c10d's names.

        Where all parameters are on one CUDA device, it is that which has measured (its current
        stream, by events); then this blocks until it is through with the pass, and is of use until
        the next one begins.
        """
        return self._watch.durations()

    def get_backward_stats(self) -> list[int]:
        """Return when each gradient of the last pass was ready, in ns since the pass began."""
        return list(self.times.ready)

    def _ended(self, began: int, ready: Sequence[int], left: int) -> None:
        """Take note that a pass is over; see `Stopwatch.ended`."""
        self._watch.ended(began, ready, left)
        self.passes += 1
        logger = self._logger and self._logger()
        if logger:
            logger.pass_ended()


def _device_timer(params: Sequence[Array], specs: Sequence[Spec]) -> TimingRecorder | None:
    """Return what measures on the device, if all parameters are on one that can."""
    devices = {spec.device for spec in specs}
    if len(devices) != 1 or not devices.pop().startswith("cuda"):
        return None
    from nc10d.reducer.device_timing import DeviceTimer

    return DeviceTimer(params[0])
