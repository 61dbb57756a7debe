"""Sends and receives as methods of a group, and several of them at once.

They are the functions of the same names in nc10d.api.batch_p2p, on this group: ranks are ranks in
the group, and `timeout` (seconds or timedelta) replaces the group's for this call. Errors are those
of nc10d.group.collectives.
"""

from __future__ import annotations

from typing import Any, Protocol

from nc10d.arrays.arguments import LARGEST_TAG, integer
from nc10d.base.deadline import Timeout
from nc10d.group.collectives import Runner
from nc10d.ops import Array, Recv, Send
from nc10d.work import Work


class BatchedMessage(Protocol):
    """A send or receive of a batch (nc10d.P2POp) as its group sees it."""

    @property
    def group(self) -> Any:
        """The group of the message."""

    def operation(self) -> Send | Recv:
        """Return the message as an operation for a backend."""


# Ranks and tags become plain ints here; nc10d.group.collectives has the reason.


def send_op(tensor: Array, dst: Any, tag: Any) -> Send:
    """Return a Send; TypeError for a rank or tag that is no integer."""
    if type(dst) is not int:
        dst = integer("send", "dst", dst)
    if type(tag) is not int:
        tag = integer("send", "tag", tag)
    return Send(tensor, dst, tag)


def recv_op(tensor: Array, src: Any, tag: Any) -> Recv:
    """Return a Recv; TypeError for a rank or tag that is no integer."""
    if src is not None and type(src) is not int:
        src = integer("recv", "src", src)
    if type(tag) is not int:
        tag = integer("recv", "tag", tag)
    return Recv(tensor, src, tag)


class PointToPoint(Runner):
    """The messages of a group; a subclass runs operations in `_run`."""

    def _wait_here(self, work: Work) -> None:
        """Wait for a synchronous call; an interrupt fails it for the whole group. Blocks."""
        work.wait()

    def send(self, tensor: Array, dst: int, tag: int = 0, timeout: Timeout = None) -> None:
        """Send `tensor` to rank `dst`; blocks until `tensor` may be changed again."""
        if type(dst) is int and type(tag) is int and 0 <= tag <= LARGEST_TAG:
            self._call(Send, dst, tensor, tag, False, timeout)
        else:
            self._run(send_op(tensor, dst, tag), tensor, False, timeout)

    def isend(self, tensor: Array, dst: int, tag: int = 0, timeout: Timeout = None) -> Work | None:
        """Start to send `tensor` to rank `dst`; return a Work."""
        if type(dst) is int and type(tag) is int and 0 <= tag <= LARGEST_TAG:
            return self._call(Send, dst, tensor, tag, True, timeout)
        return self._run(send_op(tensor, dst, tag), tensor, True, timeout)

    def recv(
        self, tensor: Array, src: int | None = None, tag: int = 0, timeout: Timeout = None
    ) -> int | None:
        """Receive into `tensor` from rank `src` (None: any); return the sender. Blocks.

        Returns None inside a coalescing block, where nothing has been received yet. Bytes and dtype
        must be those that were sent; else CollectiveMismatch.
        """
        if type(src) is int and type(tag) is int and 0 <= tag <= LARGEST_TAG:
            self._call(Recv, src, tensor, tag, False, timeout)
            return None if self._batches and self.in_batch() else src
        op = recv_op(tensor, src, tag)
        if self.in_batch():
            self._run(op, tensor, False, timeout)
            return None
        if src is not None:
            self._run(op, tensor, False, timeout)
            return op.peer
        work = self._run(op, tensor, True, timeout)
        assert work is not None, "no block is open, so there is a work to wait for"
        self._wait_here(work)
        return int(work.result())

    def irecv(
        self, tensor: Array, src: int | None = None, tag: int = 0, timeout: Timeout = None
    ) -> Work | None:
        """Start to receive into `tensor` from rank `src` (None: any); return a Work."""
        if type(src) is int and type(tag) is int and 0 <= tag <= LARGEST_TAG:
            return self._call(Recv, src, tensor, tag, True, timeout)
        return self._run(recv_op(tensor, src, tag), tensor, True, timeout)
