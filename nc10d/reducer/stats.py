"""Statistics of a Reducer's passes: their times, the used parameters, and the attached logger.

Contract: `PassStats` neither changes a pass nor waits for a rank. The Reducer calls `_record` at
the moments of a pass, and `_ended` or `_failed` afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from nc10d.base.deadline import monotonic_ns
from nc10d.group.host_calls import on_host
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import MAX, Array
from nc10d.reducer.hooks.grad_bucket import CommHook
from nc10d.reducer.plan import Spec
from nc10d.reducer.timing import DeviceTimer, Moment, PassTimes
from nc10d.work import Work

Flags = np.ndarray[Any, np.dtype[np.uint8]]


class PassObserver(Protocol):
    """An object that the Reducer notifies about each pass, such as a Logger."""

    def pass_ended(self) -> None:
        """Handle a pass's end, in the thread that finishes the pass."""

    def failed(self, error: BaseException) -> None:
        """Handle a pass's error, in the thread to which the error is raised."""


class UsedParameters:
    """Finds the parameters that any rank used, by a small all_reduce beside the buckets."""

    # A gradient that no rank has used keeps its old value: a mean of zeros would make optimizers
    # with momentum update the parameter. Flags accumulate until the next `agree`, which all ranks
    # call after the last bucket. `used` is the result of the last exchange; before, all are True.

    def __init__(self, count: int) -> None:
        self.used = [True] * count
        self.local = bytearray(count)
        """Per parameter 1 if this rank has used it, in this pass or an accumulating pass before."""
        self._any_rank: Flags = np.zeros(count, np.uint8)
        self._work: Work | None = None

    def agree(self, group: ProcessGroup) -> None:
        """Launch the exchange; all ranks call. Does not block."""
        # The exchange gets a separate array: marks for the next pass may come before it ends, and
        # after a failed pass no thread waits for it.
        self._any_rank = np.frombuffer(self.local, np.uint8)
        self.local = bytearray(len(self.local))
        self._work = on_host(group).all_reduce(self._any_rank, MAX, async_op=True)

    def wait(self) -> list[bool]:
        """Return, for each parameter, whether any rank used it; blocks until the exchange ends.

        RuntimeError without an `agree` before; DistError if the exchange failed.
        """
        if self._work is None:
            raise RuntimeError("no exchange of used parameters is under way: call agree() first")
        work, self._work = self._work, None
        work.wait()
        self.used = [bool(flag) for flag in self._any_rank]
        return self.used


class PassStats:
    """The part of a Reducer that reports statistics; `passes` counts the finished passes."""

    _hook: tuple[CommHook, object] | None

    def __init__(self, params: Sequence[Array], specs: Sequence[Spec]) -> None:
        self.passes = 0
        self._used_parameters = UsedParameters(len(specs))
        self.times = PassTimes(0, 0, [0] * len(specs), 0, 0)
        """The last finished pass's moments, on the host's clock."""
        self._forward_start = 0
        self._device_timer = _device_timer(params, specs)
        self._logger: weakref.ref[PassObserver] | None = None

    def set_logger(self, logger: PassObserver) -> None:
        """Notify a logger about each pass; the Reducer does not keep the logger alive."""
        self._logger = weakref.ref(logger)

    def prepare_for_forward(self) -> None:
        """Record the start of a forward pass, for the times of the next pass only."""
        self._forward_start = monotonic_ns()
        self._record(Moment.FORWARD_START)

    @property
    def hook_name(self) -> str:
        """The registered comm hook's name; empty without a hook."""
        return "" if self._hook is None else getattr(self._hook[0], "__qualname__", "a hook")

    @property
    def used(self) -> list[bool]:
        """For each parameter, whether any rank used it up to the end of the last finished pass.

        Without `find_unused_parameters` all are True.
        """
        return list(self._used_parameters.used)

    def durations(self) -> dict[str, int]:
        """Return the duration of each part of the last pass in ns, by c10d's names.

        If all parameters are on a single CUDA device, events on its current stream measure the
        durations. The call then blocks until the device has finished the pass, and is valid until
        the next pass begins.
        """
        timed = self.times if self._device_timer is None else self._device_timer
        return timed.durations()

    def get_backward_stats(self) -> list[int]:
        """Return when each gradient in the last pass was ready, in ns since the pass began."""
        return list(self.times.ready)

    def _record(self, moment: Moment) -> None:
        """Record that the work queued on a device so far reaches a moment; never blocks."""
        if self._device_timer is not None:
            self._device_timer.record(moment)

    def _ended(self, began: int, ready: Sequence[int], first_launch: int) -> None:
        """Record the times for a pass that ends now, and notify the logger; see PassTimes."""
        self.times = PassTimes(self._forward_start, began, ready, first_launch, monotonic_ns())
        self._forward_start = 0
        self.passes += 1
        logger = self._logger and self._logger()
        if logger:
            logger.pass_ended()

    def _failed(self, error: BaseException) -> None:
        """Notify the logger about a pass's error."""
        logger = self._logger and self._logger()
        if logger:
            logger.failed(error)


def _device_timer(params: Sequence[Array], specs: Sequence[Spec]) -> DeviceTimer | None:
    """Return a timer on the device if all parameters are on a single CUDA device, else None."""
    devices = {spec.device for spec in specs}
    if len(devices) != 1 or not devices.pop().startswith("cuda"):
        return None
    return DeviceTimer(params[0])
