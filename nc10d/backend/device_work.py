"""Waiting for operations on a device, for every backend that runs them: c10d's semantics.

`wait()` makes the current stream wait for the operation; `wait_blocking`, or a timeout, blocks the
host. A subclass defines when a stream can be made to wait, and how.
"""

from __future__ import annotations

from typing import Any

from nc10d.arrays.access import first_array
from nc10d.base.deadline import Timeout
from nc10d.base.promise import FAILED, copy_to_raise
from nc10d.cuda.streams import stream_handle, stream_of
from nc10d.work import Work


class DeviceWork(Work):
    """One launch on a device; if `blocks`, `wait()` also blocks the host."""

    __slots__ = ()

    on_stream = True
    blocks: bool

    def _await_queued(self) -> None:
        """Block until streams can wait for the operation, or the operation has failed."""
        raise NotImplementedError

    def block_stream(self, stream: int) -> None:
        """Make a stream wait for the operation, which is queued, unless the operation has ended."""
        raise NotImplementedError

    def wait(self, timeout: Timeout = None) -> bool:
        """Make the current stream wait for the operation; return True.

        As in c10d the host does not wait, except for a barrier, and while other ranks are needed
        before the operation can be queued. With `timeout` (seconds or timedelta) the host waits,
        as in `wait_blocking`. Raises the operation's error, if it has failed already.
        """
        if timeout is not None or self.blocks:
            return self.wait_blocking(timeout)
        self.join()
        return True

    def wait_blocking(self, timeout: Timeout = None) -> bool:
        """Block the host until the operation has ended; see Work.wait."""
        return super().wait(timeout)

    def block_current_stream(self) -> None:
        """Make the current stream wait for the operation."""
        self.join()

    def join(self, stream: Any = None) -> None:
        """Make `stream` wait for the operation: any library's stream or handle; None: the current.

        Blocks the host only while other ranks are needed before the operation can be queued.
        """
        self._await_queued()
        if self._state == FAILED:
            assert self._exception is not None
            raise copy_to_raise(self._exception)
        current = stream is None
        self.block_stream(stream_of(first_array(self.ops)) if current else stream_handle(stream))
