"""The in-place forms: ordinary calls by functional ones, so that a graph can have them.

Contract: outputs are written as the ordinary calls write them, in C order and without autograd. The
calls block: ValueError for `async_op`, whose Work can't be in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nc10d.api.functional import GroupLike
from nc10d.torch.functional import tensor_calls, tensor_messages
from nc10d.torch.functional.tensor_calls import Reduction
from nc10d.torch.functional.tracing import plain


def all_reduce_inplace(
    tensor: Tensor,
    op: Reduction = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """Reduce `tensor` over the group in place, and return it."""
    _check_blocking("all_reduce_inplace", async_op)
    return _write(tensor, tensor_calls.all_reduce(plain(tensor).detach(), op, group, tag))


def broadcast_inplace(
    tensor: Tensor, src: int, group: GroupLike = None, async_op: bool = False, tag: str = ""
) -> Tensor:
    """Write the tensor on the group's rank `src` to `tensor`, and return it."""
    _check_blocking("broadcast_inplace", async_op)
    return _write(tensor, tensor_calls.broadcast(plain(tensor).detach(), src, group, tag))


def all_gather_tensor_inplace(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: GroupLike = None,
    async_op: bool = False,
    tag: str = "",
    gather_dim: int = 0,
) -> Tensor:
    """Write every rank's `input_tensor` to `output_tensor`, along a dimension, and return it."""
    _check_blocking("all_gather_tensor_inplace", async_op)
    x = plain(input_tensor).detach()
    x = x.reshape(1) if x.ndim == 0 else x
    return _write(output_tensor, tensor_calls.all_gather_tensor(x, gather_dim, group, tag))


def reduce_scatter_tensor_inplace(
    output: Tensor,
    input: Tensor,
    op: Reduction = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    scatter_dim: int = 0,
    tag: str = "",
) -> Tensor:
    """Write my chunk of the reduced inputs to `output`, and return `output`."""
    _check_blocking("reduce_scatter_tensor_inplace", async_op)
    x = plain(input).detach()
    return _write(output, tensor_calls.reduce_scatter_tensor(x, op, scatter_dim, group, tag))


def all_to_all_inplace(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """Exchange rows of `input`, write the received rows to `output`, and return it."""
    _check_blocking("all_to_all_inplace", async_op)
    sizes = output_split_sizes, input_split_sizes
    return _write(output, tensor_calls.all_to_all_single(plain(input).detach(), *sizes, group, tag))


def all_gather_inplace(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: GroupLike = None,
    async_op: bool = False,
    tag: str = "",
) -> Sequence[Tensor]:
    """Write rank r's `tensor` to `tensor_list[r]`, all of one size, and return the list."""
    _check_blocking("all_gather_inplace", async_op)
    flat = plain(tensor).detach().reshape(1, -1)
    if any(x.numel() != flat.numel() for x in tensor_list):
        raise ValueError("all_gather_inplace: the tensors have different sizes")
    whole = plain(tensor_calls.all_gather_tensor(flat, 0, group, tag))
    if len(tensor_list) != whole.shape[0]:
        raise ValueError(f"all_gather_inplace: a list of {whole.shape[0]} tensors is needed")
    for index, out in enumerate(tensor_list):
        _write(out, whole[index])
    return tensor_list


def recv_inplace(tensor: Tensor, src: int, group: GroupLike = None, tag: int = 0) -> Tensor:
    """Receive `tensor` from the group's rank `src`, and return it."""
    return _write(tensor, tensor_messages.recv(tensor, src, group, tag))


def batch_p2p_inplace(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Tensor],
    group: GroupLike = None,
) -> Sequence[Tensor]:
    """Make the messages of `batch_p2p`; received tensors are written to those in the list."""
    received = tensor_messages.batch_p2p(op_list, peer_list, tag_list, tensors, group)
    outs = [x for kind, x in zip(op_list, tensors, strict=True) if kind == "irecv"]
    for out, x in zip(outs, received, strict=True):
        _write(out, x)
    return tensors


def _write(out: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        out.copy_(plain(x).reshape(out.shape))
    return out


def _check_blocking(call: str, async_op: bool) -> None:
    if async_op:
        raise ValueError(f"{call}: async_op is not possible: take the form without `inplace`")
