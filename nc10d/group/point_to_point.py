"""Sends and receives as methods, for whoever has a `_run`, and several of them at once.

What each does is written once, at the function of the same name in nc10d.api.calls; here ranks are
ranks in the group, and `timeout` (seconds or timedelta) replaces the group's for this call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nc10d.arrays.arguments import LARGEST_TAG, integer
from nc10d.base.deadline import Timeout
from nc10d.group.collectives import Runner
from nc10d.ops import Array, Recv, Send
from nc10d.work import Work


class BatchedMessage(Protocol):
    """What a group knows of a send or receive of a batch (nc10d.P2POp)."""

    @property
    def group(self) -> Any:
        """The group that it belongs to."""
        ...

    def operation(self) -> Send | Recv:
        """Return it as a backend is told of it."""
        ...

    def start(self) -> Work | None:
        """Join the group's open block."""
        ...


def start_all(messages: Sequence[BatchedMessage]) -> list[Work]:
    """Start messages in their order; return the Works of those that have one."""
    works = [one.start() for one in messages]
    return [work for work in works if work is not None]


# Ranks and tags become plain ints here, whatever else the caller has; see nc10d.group.collectives.


def _send(tensor: Array, dst: Any, tag: Any) -> Send:
    if type(dst) is not int:
        dst = integer("send", "dst", dst)
    if type(tag) is not int:
        tag = integer("send", "tag", tag)
    return Send(tensor, dst, tag)


def _recv(tensor: Array, src: Any, tag: Any) -> Recv:
    if src is not None and type(src) is not int:
        src = integer("recv", "src", src)
    if type(tag) is not int:
        tag = integer("recv", "tag", tag)
    return Recv(tensor, src, tag)


class PointToPoint(Runner):
    """The messages of a group; a subclass says in `_run` what becomes of one."""

    def _wait_here(self, work: Work) -> None:
        """Wait for a synchronous call; an interrupt ends it for the whole group."""
        work.wait()

    def send(self, tensor: Array, dst: int, tag: int = 0, timeout: Timeout = None) -> None:
        """Do as nc10d.send on this group; `dst` is a rank of it."""
        prepared = timeout is None and type(dst) is int and type(tag) is int
        if prepared and 0 <= tag <= LARGEST_TAG and self.try_prepared(Send, dst, tensor, tag):
            return
        self._run(_send(tensor, dst, tag), tensor, False, timeout)

    def isend(self, tensor: Array, dst: int, tag: int = 0, timeout: Timeout = None) -> Work | None:
        """Do as nc10d.isend on this group; `dst` is a rank of it."""
        prepared = timeout is None and type(dst) is int and type(tag) is int
        if prepared and 0 <= tag <= LARGEST_TAG:
            work = self.try_prepared(Send, dst, tensor, tag, True)
            if isinstance(work, Work):
                return work
        return self._run(_send(tensor, dst, tag), tensor, True, timeout)

    def recv(
        self, tensor: Array, src: int | None = None, tag: int = 0, timeout: Timeout = None
    ) -> int | None:
        """Do as nc10d.recv on this group; `src` and the sender returned are ranks of it.

        Inside a coalescing block nothing has come yet: returns None.
        """
        prepared = timeout is None and type(src) is int and type(tag) is int
        if prepared and 0 <= tag <= LARGEST_TAG and self.try_prepared(Recv, src, tensor, tag):
            return src
        op = _recv(tensor, src, tag)
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
        """Do as nc10d.irecv on this group; `src` is a rank of it."""
        prepared = timeout is None and type(src) is int and type(tag) is int
        if prepared and 0 <= tag <= LARGEST_TAG:
            work = self.try_prepared(Recv, src, tensor, tag, True)
            if isinstance(work, Work):
                return work
        return self._run(_recv(tensor, src, tag), tensor, True, timeout)
