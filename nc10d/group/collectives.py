"""The collectives as group methods: each makes an operation and runs it.

They are nc10d.api.calls' functions with the same names, on this group: ranks are ranks in the
group. These rules hold for all of them:

- A call blocks until this rank's arrays may be used again, and returns None. With `async_op` it
  returns a Work at once, and the arrays must not be touched until that has ended.
- `timeout` (seconds or timedelta) replaces the group's for this call. When it passes, the group
  fails on every rank.
- ValueError or TypeError for arguments that this rank alone can see to be wrong. CollectiveMismatch
  if ranks make different calls, CollectiveTimeout, PeerLost or Aborted if the group fails.
- Inside a coalescing block a call only joins the block's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from nc10d import ops
from nc10d.arrays.arguments import integer
from nc10d.base.deadline import Timeout
from nc10d.ops import SUM, Array, Op, ReduceOp
from nc10d.ops.facts import FACTS, LISTS, NOTHING, settled
from nc10d.work import Work

T = TypeVar("T")


def _given(items: Sequence[T] | None) -> Sequence[T] | None:
    """Read an empty sequence as None: c10d's callers use both for "nothing"."""
    return None if items is None or len(items) == 0 else items


class OpenBatch(Protocol):
    """A coalescing block as its group sees it: it takes operations."""

    # An operation on arrays of the type `array_type`, with the group's timeout, may go to `append`.
    # For an all_reduce on such an array by the same object as `reduction`, the array alone may go
    # to `take`.

    array_type: type | None
    reduction: object
    append: Callable[[Op], None]
    take: Callable[[Array], None]

    def add(self, op: Op, device: str, async_op: bool, timeout: Timeout) -> Work | None:
        """Take `op`; return its pending Work if `async_op`."""


class Runner:
    """The base of the method mixins: runs operations. A group overrides at least `_run`."""

    _batches: Mapping[int, OpenBatch] = MappingProxyType({})
    """The open coalescing blocks, by thread."""

    def _run(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> Work | None:
        """Launch `op`; any of its arrays, `array`, determines the device."""
        raise NotImplementedError

    def _call(
        self, kind: type[Op], extra: object, x: Array, y: Any, async_op: bool, timeout: Timeout
    ) -> Work | None:
        """Run a call, if possible as a prepared call; `extra`, `x` and `y` are as in Parts."""
        # The caller has made ranks in `extra` plain ints, since 1.0 and np.int64(1) equal 1 as
        # keys, and has checked a tag.
        return self._run(FACTS[kind].make(extra, x, y), x, async_op, timeout)

    def _start(
        self, kind: type[Op], extra: object, x: Array, y: object, timeout: Timeout
    ) -> Work | None:
        """Start an asynchronous call, if possible as a prepared call; arguments as `_call`'s."""
        return self._run(FACTS[kind].make(extra, x, y), x, True, timeout)

    def in_batch(self) -> bool:
        """Return whether this thread has a coalescing block open on the group."""
        return get_ident() in self._batches


class Collectives(Runner):
    """A group's collectives; a subclass runs operations in `_run`."""

    def all_reduce(
        self, tensor: Array, op: ReduceOp = SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Replace `tensor` on every rank by the reduction of all ranks' tensors, of equal shape."""
        if self._batches and not async_op and timeout is None:
            batch = self._batches.get(get_ident())
            if batch is not None and batch.array_type is type(tensor):  # the common case in a block
                if op is batch.reduction:
                    batch.take(tensor)
                    return None
                if type(op) is ReduceOp:
                    batch.append(ops.AllReduce(tensor, op))
                    return None
        return self._call(ops.AllReduce, op, tensor, tensor, async_op, timeout)

    def reduce(
        self,
        tensor: Array,
        dst: int,
        op: ReduceOp = SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce all ranks' tensors, with equal shapes, into rank `dst`'s; the others are kept."""
        if type(dst) is not int:
            dst = integer("reduce", "dst", dst)
        return self._call(ops.Reduce, (dst, op), tensor, tensor, async_op, timeout)

    def broadcast(
        self, tensor: Array, src: int, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Copy rank `src`'s tensor into every rank's `tensor`, with equal shape and dtype."""
        if type(src) is not int:
            src = integer("broadcast", "src", src)
        return self._call(ops.Broadcast, src, tensor, tensor, async_op, timeout)

    def scan(
        self, tensor: Array, op: ReduceOp = SUM, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Replace `tensor` on rank r by the reduction of the tensors of ranks 0 to r."""
        return self._call(ops.Scan, op, tensor, tensor, async_op, timeout)

    def exscan(
        self,
        tensor: Array,
        op: ReduceOp = SUM,
        async_op: bool = False,
        identity: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Replace `tensor` on rank r by the reduction of the lower ranks' tensors.

        Rank 0's `tensor` keeps its values; with `identity`, it is filled with the identity of `op`.
        """
        return self._call(ops.ExScan, (op, bool(identity)), tensor, tensor, async_op, timeout)

    def all_gather(
        self,
        tensor_list: Sequence[Array],
        tensor: Array,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy rank r's `tensor` into `tensor_list[r]` on every rank; sizes may differ by rank."""
        return self._call(ops.AllGather, LISTS, tensor, settled(tensor_list), async_op, timeout)

    def all_gather_into_tensor(
        self,
        output_tensor: Array,
        input_tensor: Array,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Concatenate all ranks' inputs of n elements, in rank order, into outputs of size * n."""
        return self._call(ops.AllGather, None, input_tensor, output_tensor, async_op, timeout)

    all_gather_single = all_gather_into_tensor

    def reduce_scatter(
        self,
        output: Array,
        input_list: Sequence[Array],
        op: ReduceOp = SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce all ranks' `input_list[r]` into rank r's `output`, for every rank r."""
        extra = (op, LISTS)
        return self._call(ops.ReduceScatter, extra, output, settled(input_list), async_op, timeout)

    def reduce_scatter_tensor(
        self,
        output: Array,
        input: Array,
        op: ReduceOp = SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce chunk r of all inputs into rank r's `output`: size * n elements into n."""
        return self._call(ops.ReduceScatter, op, output, input, async_op, timeout)

    reduce_scatter_single = reduce_scatter_tensor

    def all_to_all(
        self,
        output_tensor_list: Sequence[Array],
        input_tensor_list: Sequence[Array],
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Send `input_tensor_list[r]` to rank r, into its `output_tensor_list[this rank]`."""
        x, y = settled(input_tensor_list), settled(output_tensor_list)
        return self._call(ops.AllToAll, LISTS, x, y, async_op, timeout)

    def all_to_all_single(
        self,
        output: Array,
        input: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Send piece r of `input` to rank r; concatenate the pieces received into `output`.

        Pieces are rows (dimension 0): equally many for each rank, or as many as split sizes list.
        """
        if output_split_sizes is None and input_split_sizes is None:
            return self._call(ops.AllToAll, None, input, output, async_op, timeout)
        op = ops.AllToAll(output, input, _given(output_split_sizes), _given(input_split_sizes))
        extra, x, y = FACTS[ops.AllToAll].split(op)
        if x is None:
            return self._run(op, output, async_op, timeout)
        return self._call(ops.AllToAll, extra, x, y, async_op, timeout)

    def gather(
        self,
        tensor: Array,
        gather_list: Sequence[Array] | None = None,
        dst: int = 0,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy rank r's `tensor` into rank `dst`'s `gather_list[r]`; other ranks give no list."""
        if type(dst) is not int:
            dst = integer("gather", "dst", dst)
        y = settled(_given(gather_list))
        return self._call(ops.Gather, (dst, False), tensor, y, async_op, timeout)

    def gather_single(
        self,
        tensor: Array,
        gather_tensor: Array | None = None,
        dst: int = 0,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Concatenate all tensors, n elements each, in rank `dst`'s `gather_tensor`: size * n.

        `gather_tensor` is None on the other ranks.
        """
        if type(dst) is not int:
            dst = integer("gather_single", "dst", dst)
        return self._call(ops.Gather, (dst, True), tensor, gather_tensor, async_op, timeout)

    def scatter(
        self,
        tensor: Array,
        scatter_list: Sequence[Array] | None = None,
        src: int = 0,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy rank `src`'s `scatter_list[r]` into rank r's `tensor`; other ranks give no list."""
        if type(src) is not int:
            src = integer("scatter", "src", src)
        y = settled(_given(scatter_list))
        return self._call(ops.Scatter, (src, False), tensor, y, async_op, timeout)

    def scatter_single(
        self,
        output: Array,
        input: Array | None,
        src: int = 0,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy chunk r of rank `src`'s `input`, size * n elements, into rank r's `output`.

        `input` is None on the other ranks.
        """
        if type(src) is not int:
            src = integer("scatter_single", "src", src)
        return self._call(ops.Scatter, (src, True), output, input, async_op, timeout)

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Block until every rank in the group has made this call."""
        return self._call(ops.Barrier, None, NOTHING, NOTHING, async_op, timeout)
