"""The operations as methods, for whoever has a `_run`: each makes its op and hands it on.

Ranks here are ranks in the group. A tensor is any array that `as_buffer` takes. Every call blocks
until this rank's part is done and returns None; with `async_op` it returns a Work at once.
`timeout` (seconds or timedelta) replaces the group's for this call. Inside a coalescing block of
the group, calls only join the block. A caller's mistake is a ValueError or TypeError before
anything is sent; what peers or the network do wrong is a DistError out of the call or of `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.arguments import integer
from nc10d.deadline import Timeout
from nc10d.ops import (
    SUM,
    AllGather,
    AllReduce,
    AllToAll,
    Array,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Recv,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Scatter,
    Send,
)
from nc10d.work import Work

# A barrier has no array; it goes where NumPy's arrays go.
_NO_ARRAY: np.ndarray[Any, Any] = np.empty(0, np.uint8)


def _given(items: Sequence[Any] | None) -> Sequence[Any] | None:
    """Read an empty sequence as None: c10d's callers use both for "nothing"."""
    return None if items is None or len(items) == 0 else items


# Ranks and tags become plain ints here, whatever else the caller has: 1.0 and np.int64(1) are equal
# to 1 as keys of what is known already, and would pass for it.


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


class Collectives:
    """The operations of a group; a subclass says in `_run` what becomes of one."""

    def _run(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> Work | None:
        """Launch `op`; `array` is one of its arrays, which tells the device."""
        raise NotImplementedError

    def _wait_here(self, work: Work) -> None:
        """Wait for a synchronous call; an interrupt ends it for the whole group."""
        work.wait()

    def all_reduce(
        self,
        tensor: Array,
        op: ReduceOp = SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce `tensor` over the group in place; every rank ends with the same result."""
        return self._run(AllReduce(tensor, op), tensor, async_op, timeout)

    def reduce(
        self,
        tensor: Array,
        dst: int,
        op: ReduceOp = SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce `tensor` over the group into rank `dst`'s; the others' keep their values."""
        if type(dst) is not int:
            dst = integer("reduce", "dst", dst)
        return self._run(Reduce(tensor, dst, op), tensor, async_op, timeout)

    def broadcast(
        self, tensor: Array, src: int, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Copy rank `src`'s `tensor` into everybody's; same dtype and number of elements."""
        if type(src) is not int:
            src = integer("broadcast", "src", src)
        return self._run(Broadcast(tensor, src), tensor, async_op, timeout)

    def all_gather(
        self,
        tensor_list: Sequence[Array],
        tensor: Array,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy rank r's `tensor` into everybody's `tensor_list[r]`; sizes may differ by rank."""
        return self._run(AllGather(tensor_list, tensor), tensor, async_op, timeout)

    def all_gather_into_tensor(
        self,
        output_tensor: Array,
        input_tensor: Array,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy every rank's `input_tensor`, rank after rank, into everybody's `output_tensor`."""
        return self._run(AllGather(output_tensor, input_tensor), input_tensor, async_op, timeout)

    all_gather_single = all_gather_into_tensor

    def reduce_scatter(
        self,
        output: Array,
        input_list: Sequence[Array],
        op: ReduceOp = SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce everybody's `input_list[r]` into rank r's `output`; sizes may differ by rank."""
        return self._run(ReduceScatter(output, input_list, op), output, async_op, timeout)

    def reduce_scatter_tensor(
        self,
        output: Array,
        input: Array,
        op: ReduceOp = SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce everybody's chunk r of `input` into rank r's `output`."""
        return self._run(ReduceScatter(output, input, op), output, async_op, timeout)

    reduce_scatter_single = reduce_scatter_tensor

    def all_to_all(
        self,
        output_tensor_list: Sequence[Array],
        input_tensor_list: Sequence[Array],
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy my `input_tensor_list[r]` into rank r's `output_tensor_list[my rank]`."""
        op = AllToAll(output_tensor_list, input_tensor_list)
        return self._run(op, output_tensor_list, async_op, timeout)

    def all_to_all_single(
        self,
        output: Array,
        input: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Exchange slices of dimension 0: `input`'s r-th goes to rank r, `output`'s comes from it.

        Split sizes count rows, one per rank; without them the rows are divided evenly.
        """
        op = AllToAll(output, input, _given(output_split_sizes), _given(input_split_sizes))
        return self._run(op, output, async_op, timeout)

    def gather(
        self,
        tensor: Array,
        gather_list: Sequence[Array] | None = None,
        dst: int = 0,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy rank r's `tensor` into rank `dst`'s `gather_list[r]`; None on the other ranks."""
        if type(dst) is not int:
            dst = integer("gather", "dst", dst)
        return self._run(Gather(_given(gather_list), tensor, dst), tensor, async_op, timeout)

    def scatter(
        self,
        tensor: Array,
        scatter_list: Sequence[Array] | None = None,
        src: int = 0,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy rank `src`'s `scatter_list[r]` into rank r's `tensor`; None on the other ranks."""
        if type(src) is not int:
            src = integer("scatter", "src", src)
        return self._run(Scatter(tensor, _given(scatter_list), src), tensor, async_op, timeout)

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Block until every rank of the group has called."""
        return self._run(Barrier(), _NO_ARRAY, async_op, timeout)

    def send(self, tensor: Array, dst: int, tag: int = 0, timeout: Timeout = None) -> None:
        """Send `tensor` to rank `dst`; block until it may be changed again."""
        self._run(_send(tensor, dst, tag), tensor, False, timeout)

    def isend(self, tensor: Array, dst: int, tag: int = 0, timeout: Timeout = None) -> Work | None:
        """Send `tensor` to rank `dst`; it must not be changed before the Work has ended."""
        return self._run(_send(tensor, dst, tag), tensor, True, timeout)

    def recv(
        self, tensor: Array, src: int | None = None, tag: int = 0, timeout: Timeout = None
    ) -> int | None:
        """Receive `tensor` from rank `src` (None: from anyone) and return the sender's rank.

        Inside a coalescing block nothing has come yet: returns None.
        """
        op = _recv(tensor, src, tag)
        if src is not None or self.in_batch():
            self._run(op, tensor, False, timeout)
            return None if self.in_batch() else op.peer
        work = self._run(op, tensor, True, timeout)
        if work is None:
            return None
        self._wait_here(work)
        return int(work.result())

    def irecv(
        self, tensor: Array, src: int | None = None, tag: int = 0, timeout: Timeout = None
    ) -> Work | None:
        """Receive `tensor` from rank `src` (None: from anyone); `result()` is the sender."""
        return self._run(_recv(tensor, src, tag), tensor, True, timeout)

    def in_batch(self) -> bool:
        """Say whether a coalescing block of this thread is open on the group."""
        return False
