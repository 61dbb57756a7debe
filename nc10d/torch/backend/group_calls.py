"""A torch group's calls on the backend "nc10d", by the names and arguments of torch's ProcessGroup.

torch.distributed's functions, DDP's Reducer and functional collectives call these methods: from
Python, or from C++ on any thread. Ranks are ranks in the group. A call returns a TorchWork, or None
once it is over if its options say `asyncOp = False`. Options may be left out, and a tensor may
stand for a list with one tensor, as in torch's own bindings.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from nc10d import ops
from nc10d.api.monitored_barrier import monitored_barrier
from nc10d.arrays.arguments import check_elements, each_once
from nc10d.errors import DistError
from nc10d.group.coalescing import CoalescingManager
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import World, current_world
from nc10d.ops.facts import LISTS, NOTHING
from nc10d.torch.backend.launching import UNSET, TorchLauncher
from nc10d.torch.backend.torch_errors import barrier_error, raising_torch_errors
from nc10d.torch.backend.torch_reductions import BY_NUMBER, reduction, sparse_all_reduce
from nc10d.torch.backend.works import TorchWork, ended_work
from nc10d.torch.stores import as_timedelta, release

Tensors: TypeAlias = Sequence[Tensor] | Tensor
"""A tensor, or a list of one."""
TensorLists: TypeAlias = Sequence[Sequence[Tensor]] | Sequence[Tensor]
"""A list of tensors, or a list of one such list."""
Limit: TypeAlias = timedelta | None


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.open: list[CoalescingManager] = []


class TorchCalls(TorchLauncher):
    """A torch group's calls on the nc10d group below."""

    def _open(self, group: ProcessGroup, world: World, name: str) -> None:
        super()._open(group, world, name)
        self._blocks = _Blocks()
        self.splits = 0  # how often torch's split_group has split the group

    def name_for_torch(self, group: c10d.ProcessGroup, name: str) -> None:
        """Change the backend's name in torch's C++ code, "nc10d" or "gloo", for `group` above."""
        raise NotImplementedError

    @property
    def options(self) -> c10d.Backend.Options:
        """The options that torch and programs read from a backend, such as `_timeout`."""
        group = self.nc10d_group
        found = c10d.Backend.Options(self.torch_name, as_timedelta(group.timeout))
        found.global_ranks_in_group, found.group_name = [*group.ranks], group.name
        return found

    # -- collectives -----------------------------------------------------------------------------

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: Limit = None, *, op: Any = None
    ) -> TorchWork | None:
        """Reduce a tensor in place."""
        if type(opts) is not c10d.AllreduceOptions:
            opts = _options(c10d.AllreduceOptions, opts, timeout, "reduceOp", op)
        (x,) = tensors if type(tensors) is list and len(tensors) == 1 else _single(tensors)
        number = opts.reduceOp
        found = BY_NUMBER[hash(number)] or reduction(number)
        if x.is_sparse:
            with raising_torch_errors():
                sparse_all_reduce(self.nc10d_group, x, found)
            return self._kept(ended_work(), [x])
        return self._run(ops.AllReduce, found, x, x, opts, [x])

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceCoalescedOptions | None = None
    ) -> TorchWork | None:
        """Reduce tensors in place, together; a tensor that the list has twice is reduced once."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        op, xs = reduction(opts.reduceOp), [*tensors]

        def calls(timeout: Limit) -> None:
            for x in each_once("all_reduce_coalesced", "tensors", xs):
                self.nc10d_group.all_reduce(x, op, timeout=timeout)

        return self._together("all_reduce", xs, calls, opts, xs)

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: Limit = None, *, root: int | None = None
    ) -> TorchWork | None:
        """Copy the root's tensor into every rank's."""
        if type(opts) is not c10d.BroadcastOptions:
            opts = _options(c10d.BroadcastOptions, opts, timeout, "rootRank", root)
        (x,) = tensors if type(tensors) is list and len(tensors) == 1 else _single(tensors)
        return self._run(ops.Broadcast, opts.rootRank, x, x, opts, [x])

    def reduce(
        self,
        tensors: Tensors,
        opts: Any = None,
        op: c10d.ReduceOp | None = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """Reduce a tensor into the root's."""
        if type(opts) is not c10d.ReduceOptions:
            opts = _options(c10d.ReduceOptions, opts, timeout, "rootRank", root)
            opts.reduceOp = opts.reduceOp if op is None else op
        (x,) = tensors if type(tensors) is list and len(tensors) == 1 else _single(tensors)
        return self._run(ops.Reduce, (opts.rootRank, reduction(opts.reduceOp)), x, x, opts, [x])

    def allgather(
        self, outputs: TensorLists, inputs: Tensors, opts: Any = None, timeout: Limit = None
    ) -> TorchWork | None:
        """Copy rank r's tensor into every rank's `outputs[0][r]`."""
        opts = _options(c10d.AllgatherOptions, opts, timeout)
        xs, (x,) = _single_list(outputs), _single(inputs)
        return self._run(ops.AllGather, LISTS, x, tuple(xs), opts, xs)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: c10d.AllgatherOptions | None = None
    ) -> TorchWork | None:
        """Copy every rank's input, rank after rank, into `output`."""
        opts = opts or c10d.AllgatherOptions()
        return self._run(ops.AllGather, None, input, output, opts, [output])

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: c10d.AllgatherOptions | None = None,
    ) -> TorchWork | None:
        """Copy rank r's `inputs[i]` into `outputs[r][i]`."""
        opts = opts or c10d.AllgatherOptions()
        if len(outputs) != self.nc10d_group.size() or {*map(len, outputs)} != {len(inputs)}:
            raise ValueError("outputs must be a list for each rank, as long as that of inputs")

        outs = [[*xs] for xs in zip(*outputs, strict=True)]

        def calls(timeout: Limit) -> None:
            check_elements("all_gather_coalesced", outs, inputs)
            for xs, x in zip(outs, inputs, strict=True):
                self.nc10d_group.all_gather(xs, x, timeout=timeout)

        written = [x for xs in outputs for x in xs]
        return self._together("all_gather", [*inputs], calls, opts, written)

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.AllgatherOptions | None = None,
    ) -> TorchWork | None:
        """Gather each of `inputs` into the output at the same place, together."""
        opts = opts or c10d.AllgatherOptions()

        def calls(timeout: Limit) -> None:
            check_elements("all_gather_single_coalesced", [[x] for x in outputs], inputs)
            for output, x in zip(outputs, inputs, strict=True):
                self.nc10d_group.all_gather_into_tensor(output, x, timeout=timeout)

        return self._together("all_gather", [*inputs], calls, opts, [*outputs])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self,
        outputs: Tensors,
        inputs: TensorLists,
        opts: Any = None,
        timeout: Limit = None,
        *,
        op: Any = None,
    ) -> TorchWork | None:
        """Reduce all ranks' `inputs[0][r]` into rank r's output."""
        opts = _options(c10d.ReduceScatterOptions, opts, timeout, "reduceOp", op)
        (x,), xs = _single(outputs), _single_list(inputs)
        extra = reduction(opts.reduceOp), LISTS
        return self._run(ops.ReduceScatter, extra, x, tuple(xs), opts, [x])

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: c10d.ReduceScatterOptions | None = None
    ) -> TorchWork | None:
        """Reduce chunk r of all inputs into rank r's `output`."""
        opts = opts or c10d.ReduceScatterOptions()
        op = reduction(opts.reduceOp)
        return self._run(ops.ReduceScatter, op, output, input, opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: c10d.ReduceScatterOptions | None = None,
    ) -> TorchWork | None:
        """Reduce and scatter each of `inputs` into the output at the same place, together."""
        opts = opts or c10d.ReduceScatterOptions()
        op = reduction(opts.reduceOp)

        def calls(timeout: Limit) -> None:
            check_elements("reduce_scatter_single_coalesced", [[x] for x in outputs], inputs)
            for output, x in zip(outputs, inputs, strict=True):
                self.nc10d_group.reduce_scatter_tensor(output, x, op, timeout=timeout)

        return self._together("reduce_scatter", [*inputs], calls, opts, [*outputs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Limit = None,
    ) -> TorchWork | None:
        """Exchange slices of dimension 0; without split sizes they are equally long."""
        opts = _options(c10d.AllToAllOptions, opts, timeout)
        extra: tuple[tuple[int, ...] | None, ...] | None = None
        if output_split_sizes or input_split_sizes:
            extra = tuple(input_split_sizes) or None, tuple(output_split_sizes) or None
        return self._run(ops.AllToAll, extra, input, output, opts, [output])

    alltoall_base = all_to_all_single

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,
        timeout: Limit = None,
    ) -> TorchWork | None:
        """Send `inputs[r]` to rank r, into this rank's place in rank r's list."""
        opts = _options(c10d.AllToAllOptions, opts, timeout)
        xs = [*outputs]
        return self._run(ops.AllToAll, LISTS, tuple(inputs), tuple(xs), opts, xs)

    def gather(
        self,
        outputs: TensorLists,
        inputs: Tensors,
        opts: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """Copy rank r's tensor into the root's `outputs[0][r]`; others give an empty list."""
        opts = _options(c10d.GatherOptions, opts, timeout, "rootRank", root)
        xs, (x,) = _single_list(outputs), _single(inputs)
        extra = opts.rootRank, False
        return self._run(ops.Gather, extra, x, tuple(xs) or None, opts, xs or [x])

    def scatter(
        self,
        outputs: Tensors,
        inputs: TensorLists,
        opts: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> TorchWork | None:
        """Copy the root's `inputs[0][r]` into rank r's tensor; others give an empty list."""
        opts = _options(c10d.ScatterOptions, opts, timeout, "rootRank", root)
        (x,), xs = _single(outputs), _single_list(inputs)
        return self._run(ops.Scatter, (opts.rootRank, False), x, tuple(xs) or None, opts, [x])

    def barrier(self, opts: Any = None, timeout: Limit = None) -> TorchWork | None:
        """Wait until every rank in the group has made this call."""
        opts = _options(c10d.BarrierOptions, opts, timeout)
        return self._run(ops.Barrier, None, NOTHING, NOTHING, opts, [])

    def monitored_barrier(self, timeout: Limit = None, wait_all_ranks: bool = False) -> None:
        """Block until every rank has come; after the timeout, name the missing ranks."""
        timeout = getattr(timeout, "timeout", timeout)  # torch 2.14 passes options
        limit = None if timeout is None or timeout == UNSET else timeout
        try:
            monitored_barrier(self.nc10d_group, limit)
        except DistError as error:
            patient = limit is None or limit > timedelta(0)
            rank = self.nc10d_group.rank()
            raise barrier_error(error, rank, patient, wait_all_ranks) from error

    # -- messages --------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> TorchWork:
        """Start to send a tensor to a rank."""
        (x,) = tensors if type(tensors) is list and len(tensors) == 1 else _single(tensors)
        return self._message(ops.Send, dst, x, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> TorchWork:
        """Start to receive a tensor from a rank."""
        (x,) = tensors if type(tensors) is list and len(tensors) == 1 else _single(tensors)
        return self._message(ops.Recv, src, x, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        """Start to receive a tensor from any rank; the Work's source_rank names that rank."""
        (x,) = _single(tensors)
        return self._message(ops.Recv, None, x, tag)

    # -- blocks ----------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Collect this thread's calls until _end_coalescing, which launches them together."""
        block = self.nc10d_group.coalescing_manager(async_ops=True)
        block.__enter__()
        self._blocks.open.append(block)

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork | None:
        """Launch the calls since _start_coalescing; None if there were none."""
        block = self._blocks.open.pop()
        with raising_torch_errors():
            block.__exit__(None, None, None)
        return self._kept(block.works[0], []) if block.works else None

    def open_blocks(self) -> int:
        """Return the number of this thread's open blocks."""
        return len(self._blocks.open)

    def drop_blocks(self, count: int, error: BaseException) -> None:
        """End this thread's blocks but the first `count`, without a launch."""
        while len(self._blocks.open) > count:
            self._blocks.open.pop().__exit__(type(error), error, error.__traceback__)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # -- the group -------------------------------------------------------------------------------

    def abort(self) -> None:
        """Fail the group's operations on all ranks."""
        self.nc10d_group.abort("torch.distributed has aborted the group")

    def shutdown(self) -> None:
        """Close the group; operations in flight fail."""
        self._works.clear()
        self._slim.clear()
        own = current_world()
        if own.default is self.nc10d_group:  # nc10d's default group is torch's
            own.clear()
        self._world.forget(self.nc10d_group)
        release(self.nc10d_group.store)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout for later operations."""
        self.nc10d_group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: nc10d numbers every group's launches."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of launches so far on this rank."""
        return self.nc10d_group.seq


def _single(tensors: Tensors) -> list[Tensor]:
    """Return a list with one tensor, from that list or the tensor."""
    found = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    if len(found) != 1:
        raise ValueError(f"a rank has a single tensor in a call, not {len(found)}")
    return found


def _single_list(lists: TensorLists) -> list[Tensor]:
    """Return the tensor list inside a list with one list or none; a plain list unchanged."""
    found = [*lists]
    if not found or isinstance(found[0], Tensor):
        return found
    if len(found) != 1:
        raise ValueError(f"a rank has a single list of tensors in a call, not {len(found)}")
    return [*found[0]]


def _options(
    kind: type[Any], given: object, timeout: Limit, argument: str = "", named: object = None
) -> Any:
    """Return options as torch's `kind`: as given, or the default with a given `argument`.

    torch's bindings take the argument, a root or a reduction, and a timeout in place of options;
    `named` is the argument where the caller has passed it by its name.
    """
    given = given if named is None else named
    if type(given) is kind:
        return given
    made = kind()
    if isinstance(given, timedelta) and timeout is None:
        given, timeout = None, given
    if given is not None:
        if not argument:
            raise TypeError(f"expected {kind.__name__} or a timedelta, got {given!r}")
        setattr(made, argument, given)
    if timeout is not None:
        made.timeout = timeout
    return made
