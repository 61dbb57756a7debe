"""Sends and receives as group methods, and several of them at once.

They are the functions with the same names in nc10d.api.batch_p2p, on this group: ranks are ranks in
the group, and `timeout` (seconds or timedelta) replaces the group's for this call. Errors are those
of nc10d.group.collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nc10d.arrays.arguments import LARGEST_TAG, check_exchange, integer
from nc10d.base.deadline import Deadline, Timeout
from nc10d.base.text import in_seconds
from nc10d.errors import CollectiveTimeout
from nc10d.group.array_copies import copy_array, copy_of
from nc10d.group.collectives import Runner
from nc10d.ops import Array, MessageInfo, Recv, Send
from nc10d.work import Work


class BatchedMessage(Protocol):
    """A send or receive in a batch (nc10d.P2POp) as its group sees it."""

    @property
    def group(self) -> Any:
        """The message's group."""

    def operation(self) -> Send | Recv:
        """Return the message as an operation for a backend."""


# Ranks and tags become plain ints here; nc10d.group.collectives has the reason.


def send_op(tensor: Array, dst: object, tag: object) -> Send:
    """Return a Send; TypeError for a rank or tag that is no integer."""
    if type(dst) is not int:
        dst = integer("send", "dst", dst)
    if type(tag) is not int:
        tag = integer("send", "tag", tag)
    return Send(tensor, dst, tag)


def recv_op(tensor: Array, src: object, tag: object) -> Recv:
    """Return a Recv; TypeError for a rank or tag that is no integer."""
    if src is not None and type(src) is not int:
        src = integer("recv", "src", src)
    if type(tag) is not int:
        tag = integer("recv", "tag", tag)
    return Recv(tensor, src, tag)


class PointToPoint(Runner):
    """A group's messages; a subclass runs operations in `_run`."""

    rank: int
    size: int
    timeout: float

    def _wait_here(self, work: Work) -> None:
        """Wait for a synchronous call; an interrupt fails the call for the whole group. Blocks."""
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
            return self._start(Send, dst, tensor, tag, timeout)
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
            return self._start(Recv, src, tensor, tag, timeout)
        return self._run(recv_op(tensor, src, tag), tensor, True, timeout)

    def sendrecv(
        self,
        tensor: Array,
        dst: int,
        output: Array,
        src: int | None,
        tag: int = 0,
        recv_tag: int | None = None,
        timeout: Timeout = None,
    ) -> int | None:
        """Send `tensor` to rank `dst` and receive `output` from rank `src`; return the sender.

        Both go on at once: blocks until both are done. `src` is None for any rank, `recv_tag` is
        `tag` unless given. As in MPI, `dst` and `src` may both be this rank, but not inside a
        coalescing block. Returns None inside one.
        """
        take = tag if recv_tag is None else recv_tag
        plain = type(dst) is type(src) is type(tag) is type(take) is int and timeout is None
        valid = plain and 0 <= tag <= LARGEST_TAG and 0 <= take <= LARGEST_TAG
        if valid and self._exchange(dst, tensor, tag, src, output, take):  # type: ignore[arg-type]
            return src
        return self._exchange_new(send_op(tensor, dst, tag), recv_op(output, src, take), timeout)

    def sendrecv_replace(
        self,
        tensor: Array,
        dst: int,
        src: int | None,
        tag: int = 0,
        recv_tag: int | None = None,
        timeout: Timeout = None,
    ) -> int | None:
        """Send `tensor` to rank `dst`, then replace it by an array from `src`; see `sendrecv`.

        A copy of `tensor` is sent. ValueError inside a coalescing block.
        """
        if self.in_batch():  # an earlier call in the block may compute `tensor`
            message = "sendrecv_replace is not possible inside a coalescing block: use two arrays"
            raise ValueError(message)
        return self.sendrecv(copy_of(tensor), dst, tensor, src, tag, recv_tag, timeout)

    def _start_messages(self, ops: Sequence[Send | Recv], timeout: Timeout) -> list[Work]:
        """Launch messages as a single submission, and return their Works."""
        raise NotImplementedError

    def _exchange(self, dst: int, x: Array, tag: int, src: int, y: Array, take: int) -> bool:
        """Exchange prepared messages; False: nothing has happened. Blocks."""
        return False

    def _exchange_new(self, send: Send, recv: Recv, timeout: Timeout) -> int | None:
        check_exchange(send, recv, self.rank, self.size)
        if self.in_batch():
            if send.peer == self.rank:
                message = "with this rank itself is not possible inside a coalescing block"
                raise ValueError(f"sendrecv {message}: copy the array")
            self._run(send, send.x, False, timeout)
            self._run(recv, recv.x, False, timeout)
            return None
        if send.peer == self.rank:
            copy_array(recv.x, send.x)
            return recv.peer
        works = self._start_messages((send, recv), timeout)
        for work in works:
            self._wait_here(work)
        return int(works[1].result())

    def iprobe(self, src: int | None = None, tag: int | None = None) -> MessageInfo | None:
        """Return the next message from `src` with `tag` (None: any), None if none has come.

        The message is not received: a `recv` with its `src` and `tag` takes it. ValueError if the
        backend can't see messages before they are received (NCCL).
        """
        return self._probe(src, tag, Deadline(0.0))

    def probe(
        self, src: int | None = None, tag: int | None = None, timeout: Timeout = None
    ) -> MessageInfo:
        """Wait for a message from `src` with `tag` (None: any) and return it; see `iprobe`.

        CollectiveTimeout, in this caller alone, if none has come within the timeout. PeerLost if
        all ranks that could send it have left.
        """
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        found = self._probe(src, tag, deadline)
        if found is None:
            limit = in_seconds(deadline.limit)
            message = f"probe: no such message has come to rank {self.rank} within {limit}"
            raise CollectiveTimeout(message, rank=int(self.rank), op="probe")
        return found

    def _probe(self, src: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Look for a message until `deadline`; blocks."""
        raise NotImplementedError
