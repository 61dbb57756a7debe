"""What waiting means for operations on a device, whichever backend runs them: c10d's semantics.

`wait()` puts the operation in front of what is queued next on the current stream; `wait_blocking`,
or a timeout, blocks the host. A subclass says when a stream can be told to wait, and how.
"""

from __future__ import annotations

from typing import Any

from nc10d.arrays.access import first_array
from nc10d.base.deadline import Timeout
from nc10d.base.outcome import FAILED, fresh
from nc10d.cuda.streams import stream_handle, stream_of
from nc10d.work import Work


class DeviceWork(Work):
    """One launch on a device; `blocks` says whether the host waits for it in any case."""

    __slots__ = ()

    blocks: bool

    def _await_queued(self) -> None:
        """Block until streams can be told to wait for the operation, or it has failed."""
        raise NotImplementedError

    def block_stream(self, stream: int) -> None:
        """Let a stream wait for the operation, if it is not over yet; it has its place."""
        raise NotImplementedError

    def wait(self, timeout: Timeout = None) -> bool:
        """Put the operation in front of what is queued next on the current stream; return True.

        As in c10d the host goes on, except for a barrier, and where other ranks are needed first.
        With `timeout` (seconds or timedelta) it waits, as `wait_blocking` does. Raises what made
        the operation fail, if that is known.
        """
        if timeout is not None or self.blocks:
            return self.wait_blocking(timeout)
        self.join()
        return True

    def wait_blocking(self, timeout: Timeout = None) -> bool:
        """Block the host until the operation is over; see Work.wait."""
        return super().wait(timeout)

    def synchronize(self) -> None:
        """Do as `wait()`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Put the operation in front of what is queued next on the current stream."""
        self.join()

    def join(self, stream: Any = None) -> None:
        """Let a stream (anybody's, or its handle; without one, the current) wait for the operation.

        Blocks the host only while other ranks are needed before that can be.
        """
        self._await_queued()
        if self._state == FAILED:
            assert self._exception is not None
            raise fresh(self._exception)
        current = stream is None
        self.block_stream(stream_of(first_array(self.ops)) if current else stream_handle(stream))
