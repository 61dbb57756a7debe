"""torch.distributed.nn.functional on nc10d: differentiable collectives by their older names.

    from nc10d.torch.nn import functional

    total = functional.all_reduce(loss)      # total.backward() on every rank

Contract: names, arguments and results are torch's; `src` and `dst` are global ranks, and a group
has any form that `nc10d.torch.functional` takes. Calls block and return complete tensors. Gradients
are those of the sum of all ranks' losses, so every rank must run the backward pass. Unlike torch's,
the calls can be compiled, traced and transformed; a mean has the gradient of a mean, and a
reduction without a gradient ("max") is a NotImplementedError in the backward pass. A caller's
mistake is a ValueError before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from nc10d.api.functional import GroupLike
from nc10d.ops import SUM
from nc10d.torch.functional import tensor_calls
from nc10d.torch.functional.derivatives import call
from nc10d.torch.functional.labels import label, member, spelled
from nc10d.torch.functional.tensor_calls import Reduction
from nc10d.torch.functional.tracing import plain

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def all_reduce(tensor: Tensor, op: Reduction = SUM, group: GroupLike = None) -> Tensor:
    """Return the reduction of every rank's `tensor`, in its shape and dtype."""
    return tensor_calls.all_reduce_autograd(tensor, op, group)


def broadcast(tensor: Tensor, src: int, group: GroupLike = None) -> Tensor:
    """Return the `tensor` on the global rank `src`; every rank's has the same shape and dtype."""
    return tensor_calls.broadcast_autograd(tensor, member(group, src), group)


def reduce(tensor: Tensor, dst: int, op: Reduction = SUM, group: GroupLike = None) -> Tensor:
    """Return the reduction of every rank's `tensor` on the global rank `dst`, zeros elsewhere."""
    name, size = label(group)
    return call("reduce", plain(tensor), spelled(op), member(group, dst), size, name)


def gather(tensor: Tensor, dst: int = 0, group: GroupLike = None) -> tuple[Tensor, ...]:
    """Return every rank's `tensor` on the global rank `dst`, tensors of zeros elsewhere."""
    name, size = label(group)
    rows = call("gather", plain(tensor).unsqueeze(0), member(group, dst), size, name)
    return tuple(rows.unbind(0))


def scatter(tensors: Sequence[Tensor], src: int = 0, group: GroupLike = None) -> Tensor:
    """Return tensor r from the list on the global rank `src`, on rank r in the group.

    Every rank gives a list of that many tensors with the same shape and dtype.
    """
    name, size = label(group)
    return call("scatter", _stack("scatter", tensors, size), member(group, src), size, name)[0]


def all_gather(tensor: Tensor, group: GroupLike = None) -> tuple[Tensor, ...]:
    """Return every rank's `tensor`; all have the same shape and dtype."""
    name, size = label(group)
    return tuple(call("all_gather_into_tensor", plain(tensor).unsqueeze(0), size, name).unbind(0))


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Reduction = SUM, group: GroupLike = None
) -> Tensor:
    """Return the reduction of tensor r of every rank's list, on rank r; `output` is written, too.

    Every rank gives a list of as many tensors as there are ranks, with the shape of `output`.
    """
    name, size = label(group)
    rows = _stack("reduce_scatter", input_list, size)
    return _written(output, call("reduce_scatter_tensor", rows, spelled(op), size, name)[0])


def _all_gather_base(
    output_tensor: Tensor, input_tensor: Tensor, group: GroupLike = None
) -> Tensor:
    """Return every rank's `input_tensor`, rank after rank; `output_tensor` is written, too."""
    gathered = tensor_calls.all_gather_tensor_autograd(input_tensor, 0, group)
    return _written(output_tensor, gathered)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = None,
) -> tuple[Tensor, ...]:
    """Send tensor r to rank r, and return the received tensors; the outputs are written, too.

    Tensors may have any shapes; an output has as many elements as the tensor sent to it. Every
    tensor has the same dtype.
    """
    name, size = label(group)
    if not len(output_tensor_list) == len(input_tensor_list) == size:
        raise ValueError(f"all_to_all: lists of {size} tensors are needed, one for each rank")
    inputs = [plain(x) for x in input_tensor_list]
    counts = [[prod(x.shape) for x in xs] for xs in (output_tensor_list, inputs)]
    sent = torch.cat([x.reshape(-1) for x in inputs])
    received = call("all_to_all_single", sent, *counts, name).split(counts[0])
    pairs = zip(output_tensor_list, received, strict=True)
    return tuple(_written(out, x) for out, x in pairs)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Send rows of `input` to each rank, return the received rows; `output` is written, too.

    Split sizes are numbers of rows, a number for each rank; None or an empty list means an even
    division.
    """
    _, size = label(group)
    parts = output_split_sizes or _even(output, size), input_split_sizes or _even(input, size)
    return _written(output, tensor_calls.all_to_all_single_autograd(input, *parts, group))


def _even(x: Tensor, size: int) -> list[int]:
    if x.ndim == 0 or x.shape[0] % size:
        raise ValueError(f"all_to_all_single: a shape {list(x.shape)} has no {size} equal parts")
    return [x.shape[0] // size] * size


def _stack(name: str, tensors: Sequence[Tensor], size: int) -> Tensor:
    xs = [plain(x) for x in tensors]
    if len(xs) != size or any(x.shape != xs[0].shape for x in xs):
        raise ValueError(f"{name}: a list of {size} tensors of the same shape is needed")
    return torch.stack(xs)


def _written(out: Tensor, x: Tensor) -> Tensor:
    """Write a result to the memory that the caller gave, and return it in that shape."""
    if prod(out.shape) != prod(x.shape) or out.dtype != x.dtype:
        raise ValueError(
            f"an output of {list(out.shape)} {out.dtype} can't hold a result of "
            f"{list(x.shape)} {x.dtype}"
        )
    x = x.reshape(out.shape)
    out.detach().copy_(x.detach())
    return x
