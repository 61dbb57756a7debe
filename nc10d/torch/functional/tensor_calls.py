"""Functional collectives on tensors: one call for eager programs, graphs, transforms and autograd.

Contract: an eager call is asynchronous and returns an AsyncCollectiveTensor. A call that a tracer,
a transform or autograd must see is an operator `nc10d::*`, which blocks. `nc10d.functional`
describes the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from nc10d.api import functional
from nc10d.api.async_array import AsyncCollectiveArray
from nc10d.api.functional import GroupLike
from nc10d.ops import ReduceOp
from nc10d.torch.functional.async_tensor import AsyncCollectiveTensor
from nc10d.torch.functional.derivatives import call
from nc10d.torch.functional.labels import found_group, label, spelled
from nc10d.torch.functional.tracing import needs_operator, plain

Reduction = str | ReduceOp
TensorOrFields = TypeVar("TensorOrFields", Tensor, tuple[Tensor, ...])


def started(start: Callable[..., AsyncCollectiveArray], x: Tensor, *args: object) -> Tensor:
    """Return the result of an asynchronous call in `nc10d.functional`."""
    return AsyncCollectiveTensor(start(x.detach() if x.requires_grad else x, *args))


def all_reduce(
    tensor: TensorOrFields, reduce_op: Reduction, group: GroupLike = None, tag: str = ""
) -> TensorOrFields:
    """Return the reduction of every rank's `tensor`, in its shape and dtype.

    A tuple has a tensor for each field of the reduction's records.
    """
    if isinstance(tensor, tuple):
        return _of_fields("all_reduce", tensor, reduce_op, (group, tag))
    x = plain(tensor)
    if needs_operator(x):
        return all_reduce_autograd(x, reduce_op, group, tag)
    return started(functional.all_reduce, x, reduce_op, found_group(group, tag))


def all_reduce_autograd(
    tensor: Tensor, reduce_op: Reduction, group: GroupLike = None, tag: str = ""
) -> Tensor:
    """Return a complete, differentiable all_reduce: the gradient is reduced likewise. Blocks."""
    name, _ = label(group, tag)
    return call("all_reduce", plain(tensor), spelled(reduce_op), name)


def broadcast(tensor: Tensor, src: int, group: GroupLike = None, tag: str = "") -> Tensor:
    """Return rank `src`'s `tensor`; every rank's has the same shape and dtype."""
    x = plain(tensor)
    if needs_operator(x):
        return broadcast_autograd(x, src, group, tag)
    return started(functional.broadcast, x, src, found_group(group, tag))


def broadcast_autograd(tensor: Tensor, src: int, group: GroupLike = None, tag: str = "") -> Tensor:
    """Return a complete, differentiable broadcast: `src` gets the gradients' sum. Blocks."""
    name, _ = label(group, tag)
    return call("broadcast", plain(tensor), src, name)


def all_gather_tensor(
    tensor: Tensor, gather_dim: int, group: GroupLike = None, tag: str = ""
) -> Tensor:
    """Return every rank's `tensor`, rank after rank along `gather_dim`. All have the same shape."""
    x = plain(tensor)
    if needs_operator(x):
        return all_gather_tensor_autograd(x, gather_dim, group, tag)
    return started(functional.all_gather_tensor, x, gather_dim, found_group(group, tag))


def all_gather_tensor_autograd(
    tensor: Tensor, gather_dim: int, group: GroupLike = None, tag: str = ""
) -> Tensor:
    """Return a complete, differentiable all_gather_tensor: gradients are summed. Blocks."""
    name, size = label(group, tag)
    x, dim = plain(tensor), _dim(tensor, gather_dim)
    out = call("all_gather_into_tensor", x.movedim(dim, 0), size, name)
    return out.movedim(0, dim).contiguous()


def reduce_scatter_tensor(
    tensor: TensorOrFields,
    reduce_op: Reduction,
    scatter_dim: int,
    group: GroupLike = None,
    tag: str = "",
) -> TensorOrFields:
    """Return my chunk of the reduction of every rank's `tensor`, cut along `scatter_dim`.

    A tuple is as in `all_reduce`, and cut along dimension 0.
    """
    if isinstance(tensor, tuple):
        return _of_fields("reduce_scatter_tensor", tensor, reduce_op, (group, tag), scatter_dim)
    x = plain(tensor)
    if needs_operator(x):
        return reduce_scatter_tensor_autograd(x, reduce_op, scatter_dim, group, tag)
    found = found_group(group, tag)
    return started(functional.reduce_scatter_tensor, x, reduce_op, scatter_dim, found)


def reduce_scatter_tensor_autograd(
    tensor: Tensor, reduce_op: Reduction, scatter_dim: int, group: GroupLike = None, tag: str = ""
) -> Tensor:
    """Return a complete, differentiable reduce_scatter_tensor: gradients are gathered. Blocks."""
    name, size = label(group, tag)
    x, dim = plain(tensor), _dim(tensor, scatter_dim)
    out = call("reduce_scatter_tensor", x.movedim(dim, 0), spelled(reduce_op), size, name)
    return out.movedim(0, dim).contiguous()


def all_to_all_single(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: GroupLike = None,
    tag: str = "",
) -> Tensor:
    """Send rows of `tensor` to each rank, and return the received rows, rank after rank.

    Split sizes are numbers of rows, a number for each rank; without both, rows are divided evenly.
    """
    x, sizes = plain(tensor), (output_split_sizes, input_split_sizes)
    if needs_operator(x):
        return all_to_all_single_autograd(x, *sizes, group, tag)
    return started(functional.all_to_all_single, x, *sizes, found_group(group, tag))


def all_to_all_single_autograd(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: GroupLike = None,
    tag: str = "",
) -> Tensor:
    """Return a complete, differentiable all_to_all_single: gradients go back. Blocks."""
    name, size = label(group, tag)
    x = plain(tensor)
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise ValueError("all_to_all_single: give both split sizes or none")
    if output_split_sizes is None or input_split_sizes is None:
        if x.shape[0] % size:
            raise ValueError(
                f"all_to_all_single: {x.shape[0]} rows can't be divided by {size} ranks"
            )
        output_split_sizes = input_split_sizes = ()
    return call("all_to_all_single", x, list(output_split_sizes), list(input_split_sizes), name)


def permute_tensor(
    tensor: Tensor, src_dst: Sequence[int], group: GroupLike = None, tag: str = ""
) -> Tensor:
    """Send `tensor` to rank `src_dst[my rank]`; return the received tensor, in the same shape.

    `src_dst` has each rank in the group once.
    """
    x = plain(tensor)
    if not needs_operator(x):
        return started(functional.permute_tensor, x, src_dst, found_group(group, tag))
    name, size = label(group, tag)
    if sorted(src_dst) != list(range(size)):
        raise ValueError(f"permute_tensor: src_dst must have each of {size} ranks once")
    return call("permute_tensor", x, list(src_dst), name)


def all_reduce_coalesced(
    tensors: Sequence[Tensor], reduce_op: Reduction, group: GroupLike = None, tag: str = ""
) -> list[Tensor]:
    """Return the all_reduce of each of `tensors`, launched together."""
    xs = [plain(x) for x in tensors]
    if needs_operator(*xs):
        name, _ = label(group, tag)
        return call("all_reduce_coalesced", xs, spelled(reduce_op), name)
    found = found_group(group, tag)
    return _started_each(functional.all_reduce_coalesced, xs, reduce_op, found)


def all_gather_into_tensor_coalesced(
    tensors: Sequence[Tensor], group: GroupLike = None, tag: str = ""
) -> list[Tensor]:
    """Return the all_gather_tensor of each of `tensors` along dimension 0, launched together."""
    xs = [plain(x) for x in tensors]
    if needs_operator(*xs):
        name, size = label(group, tag)
        return call("all_gather_into_tensor_coalesced", xs, size, name)
    found = found_group(group, tag)
    return _started_each(functional.all_gather_into_tensor_coalesced, xs, found)


def reduce_scatter_tensor_coalesced(
    tensors: Sequence[Tensor],
    reduce_op: Reduction,
    scatter_dim: Sequence[int],
    group: GroupLike = None,
    tag: str = "",
) -> list[Tensor]:
    """Return the reduce_scatter_tensor of each of `tensors`, launched together.

    `scatter_dim` has a dimension for each.
    """
    xs = [plain(x) for x in tensors]
    if not needs_operator(*xs):
        start, found = functional.reduce_scatter_tensor_coalesced, found_group(group, tag)
        return _started_each(start, xs, reduce_op, scatter_dim, found)
    name, size = label(group, tag)
    dims = [_dim(x, d) for x, d in zip(xs, scatter_dim, strict=True)]
    moved = [x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
    outs = call("reduce_scatter_tensor_coalesced", moved, spelled(reduce_op), size, name)
    return [out.movedim(0, d).contiguous() for out, d in zip(outs, dims, strict=True)]


def _of_fields(
    name: str, fields: tuple[Tensor, ...], op: Reduction, group: tuple[GroupLike, str], *dim: int
) -> tuple[Tensor, ...]:
    """Return the results of a call on records that have a tensor for each field."""
    xs = tuple(map(plain, fields))
    if any(dim):
        raise ValueError(f"{name}: fields are cut along dimension 0, not {dim[0]}")
    if needs_operator(*xs):
        group_name, size = label(*group)
        return tuple(call(f"{name}_fields", xs, spelled(op), size, group_name))
    found = found_group(*group)
    return tuple(_started_each(getattr(functional, name), xs, op, *dim, found))


def _started_each(
    start: Callable[..., Sequence[AsyncCollectiveArray]], xs: Sequence[Tensor], *args: object
) -> list[Tensor]:
    return [AsyncCollectiveTensor(pending) for pending in start(xs, *args)]


def _dim(x: Tensor, dim: int) -> int:
    # The function of `nc10d.functional` is not traced.
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"the tensor has {x.ndim} dimensions, there is no dimension {dim}")
    return dim % x.ndim
