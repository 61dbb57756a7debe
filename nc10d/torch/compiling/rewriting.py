"""Substitutes of ordinary calls in compiled functions: the in-place forms of `torch.functional`.

Contract: the calls themselves stay as they are; only the compiler looks at the attribute that names
the substitute. A substitute passes a call that a graph can't have (asynchronous, with `out`, on
other arrays, in a coalescing block) to the ordinary call, which is a graph break. A group's methods
have no substitutes: after a break torch 2.13 would call one without the group. Operators and the
compiler are imported when a function is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeAlias, TypeGuard

import torch

from nc10d.api import batch_p2p, calls
from nc10d.base.deadline import Timeout
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import Group, current_world
from nc10d.ops import SUM, Array, ReduceOp
from nc10d.torch.backend.groups import own_group
from nc10d.torch.uncompiled import in_python
from nc10d.work import Work

Rank: TypeAlias = int | None


def _ordinary(function: object) -> Any:
    """Return a copy of a call, which the compiler leaves to Python."""
    assert isinstance(function, FunctionType)
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
    return in_python(twin)


def in_block() -> bool:
    """Return whether this thread has an open coalescing block; asked while tracing."""
    return any(group.in_batch() for group in current_world().groups.values())


def _fits(group: object, async_op: bool, *tensors: object) -> TypeGuard[ProcessGroup | None]:
    """Return whether a graph can have a call."""
    if async_op or not (group is None or isinstance(group, ProcessGroup)):
        return False
    return all(isinstance(x, torch.Tensor) for x in tensors) and not in_block()


def default_rank(rank: int) -> int | None:
    """Return a global rank's number in the default group; asked while tracing."""
    return own_group(None).numbers.get(rank)


for _function in (in_block, default_rank):
    vars(_function)["_dynamo_marked_constant"] = True


def _rank_in(group: ProcessGroup | None, rank: object, group_rank: object) -> int | None:
    """Return a rank in the group, or None for arguments that the ordinary call must judge."""
    if rank is None:
        return group_rank if isinstance(group_rank, int) else None
    if group_rank is not None or not isinstance(rank, int):
        return None
    return default_rank(rank) if group is None else group.numbers.get(rank)


def all_reduce(
    tensor: Array,
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    out: Array | None = None,
) -> Work | None:
    """Stand for nc10d.all_reduce."""
    if out is None and _fits(group, async_op, tensor):
        from nc10d.torch.functional import in_place

        in_place.all_reduce_inplace(tensor, op, group)
        return None
    return _ALL_REDUCE(tensor, op, group, async_op, out=out)


def broadcast(
    tensor: Array,
    src: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_src: Rank = None,
) -> Work | None:
    """Stand for nc10d.broadcast."""
    if _fits(group, async_op, tensor):
        root = _rank_in(group, src, group_src)
        if root is not None:
            from nc10d.torch.functional import in_place

            in_place.broadcast_inplace(tensor, root, group)
            return None
    return _BROADCAST(tensor, src, group, async_op, group_src)


def all_gather_into_tensor(
    output_tensor: Array, input_tensor: Array, group: Group = None, async_op: bool = False
) -> Work | None:
    """Stand for nc10d.all_gather_into_tensor."""
    if _fits(group, async_op, output_tensor, input_tensor):
        from nc10d.torch.functional import in_place

        in_place.all_gather_tensor_inplace(output_tensor, input_tensor, group)
        return None
    return _ALL_GATHER_INTO_TENSOR(output_tensor, input_tensor, group, async_op)


def all_gather(
    tensor_list: Sequence[Array], tensor: Array, group: Group = None, async_op: bool = False
) -> Work | None:
    """Stand for nc10d.all_gather; only with tensors of one size."""
    if _fits(group, async_op, tensor, *tensor_list) and all(
        x.shape == tensor.shape for x in tensor_list
    ):
        from nc10d.torch.functional import in_place

        in_place.all_gather_inplace(tensor_list, tensor, group)
        return None
    return _ALL_GATHER(tensor_list, tensor, group, async_op)


def reduce_scatter_tensor(
    output: Array, input: Array, op: ReduceOp = SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Stand for nc10d.reduce_scatter_tensor."""
    if _fits(group, async_op, output, input) and input.ndim > 0:
        from nc10d.torch.functional import in_place

        in_place.reduce_scatter_tensor_inplace(output, input.reshape(-1), op, group)
        return None
    return _REDUCE_SCATTER_TENSOR(output, input, op, group, async_op)


def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Stand for nc10d.all_to_all_single."""
    sizes = output_split_sizes, input_split_sizes
    if _fits(group, async_op, output, input) and (sizes[0] is None) == (sizes[1] is None):
        from nc10d.torch.functional import in_place

        in_place.all_to_all_inplace(output, input, *sizes, group)
        return None
    return _ALL_TO_ALL_SINGLE(output, input, *sizes, group, async_op)


def send(
    tensor: Array, dst: Rank = None, group: Group = None, tag: int = 0, group_dst: Rank = None
) -> Work | None:
    """Stand for nc10d.send."""
    if _fits(group, False, tensor):
        peer = _rank_in(group, dst, group_dst)
        if peer is not None:
            from nc10d.torch.functional import tensor_messages

            tensor_messages.send(tensor, peer, group, tag)
            return None
    return _SEND(tensor, dst, group, tag, group_dst)


def recv(
    tensor: Array, src: Rank = None, group: Group = None, tag: int = 0, group_src: Rank = None
) -> int | None:
    """Stand for nc10d.recv from a named rank."""
    if src is not None and _fits(group, False, tensor):
        peer = _rank_in(group, src, group_src)
        if peer is not None:
            from nc10d.torch.functional import in_place

            in_place.recv_inplace(tensor, peer, group, tag)
            return src
    return _RECV(tensor, src, group, tag, group_src)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Stand for nc10d.barrier."""
    if device_ids is None and timeout is None and _fits(group, async_op):
        from nc10d.torch.functional import tensor_messages

        tensor_messages.barrier(group)
        return None
    return _BARRIER(group, async_op, device_ids, timeout)


_ALL_REDUCE = _ordinary(calls.all_reduce)
_BROADCAST = _ordinary(calls.broadcast)
_ALL_GATHER_INTO_TENSOR = _ordinary(calls.all_gather_into_tensor)
_ALL_GATHER = _ordinary(calls.all_gather)
_REDUCE_SCATTER_TENSOR = _ordinary(calls.reduce_scatter_tensor)
_ALL_TO_ALL_SINGLE = _ordinary(calls.all_to_all_single)
_BARRIER = _ordinary(calls.barrier)
_SEND = _ordinary(batch_p2p.send)
_RECV = _ordinary(batch_p2p.recv)

_SUBSTITUTES: dict[Any, Callable[..., object]] = {
    calls.all_reduce: all_reduce,
    calls.broadcast: broadcast,
    calls.all_gather_into_tensor: all_gather_into_tensor,
    calls.all_gather: all_gather,
    calls.reduce_scatter_tensor: reduce_scatter_tensor,
    calls.all_to_all_single: all_to_all_single,
    calls.barrier: barrier,
    batch_p2p.send: send,
    batch_p2p.recv: recv,
}


def rewrite_calls() -> None:
    """Name the calls' substitutes, where the compiler looks for them."""
    for function, substitute in _SUBSTITUTES.items():
        function._torchdynamo_inline = substitute
