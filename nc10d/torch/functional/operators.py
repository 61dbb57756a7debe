"""The operators `nc10d::*`, with schemas of plain data: collectives in a graph.

Contract: an operator blocks, as the ordinary call does, and returns new, contiguous tensors. So a
compiler may free or reuse all memory that the graph does not read any more. On a GPU an operator
orders the current stream. The effect ORDERED keeps a graph's operators in program order, whatever
their group, and keeps an operator whose result nobody reads. `group_name` is the label of a group
on the calling rank, see `labels`; ranks are numbered in that group. Sizes are checked before
anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import effects

from nc10d.torch.functional.labels import reduction, resolve

Kernel = Callable[..., Any]

library = torch.library.Library("nc10d", "FRAGMENT")


def register(signature: str, kernel: Kernel, fake: Kernel) -> str:
    """Define an operator with a kernel for all devices, and a kernel on shapes.

    Return its name.
    """
    name = signature.partition("(")[0]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    library.define(signature, tags=tags)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nc10d::{name}", fake, lib=library)
    operator = getattr(torch.ops.nc10d, name).default
    effects._register_effectful_op(operator, effects._EffectType.ORDERED)
    return name


def copy_of(x: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


def rows(x: Tensor, count: int) -> Tensor:
    """Return an empty tensor with `count` rows, shaped as the rows of `x`."""
    return x.new_empty((count, *x.shape[1:]))


def shared_rows(call: str, x: Tensor, size: int) -> int:
    """Return how many rows a rank's chunk has; ValueError if `x` can't be divided evenly."""
    if x.ndim == 0:
        raise ValueError(f"{call}: a tensor without dimensions can't be divided")
    if x.shape[0] % size:
        raise ValueError(f"{call}: {x.shape[0]} rows can't be divided by {size} ranks")
    return x.shape[0] // size


def same(x: Tensor, *_: object) -> Tensor:
    """Return an empty tensor like `x`, contiguous."""
    return x.new_empty(x.shape)


def _all_reduce(x: Tensor, reduce_op: str, group_name: str) -> Tensor:
    out = copy_of(x)
    resolve(group_name).all_reduce(out, reduction(reduce_op))
    return out


def _reduce(x: Tensor, reduce_op: str, dst: int, _group_size: int, group_name: str) -> Tensor:
    group, out = resolve(group_name), copy_of(x)
    group.reduce(out, dst, reduction(reduce_op))
    return out if group.rank == dst else out.zero_()


def _broadcast(x: Tensor, src: int, group_name: str) -> Tensor:
    out = copy_of(x)
    resolve(group_name).broadcast(out, src)
    return out


def _gathered(x: Tensor, size: int, *_: object) -> Tensor:
    return rows(x, x.shape[0] * size)


def _all_gather(x: Tensor, group_size: int, group_name: str) -> Tensor:
    group, out = resolve(group_name, group_size), _gathered(x, group_size)
    group.all_gather_into_tensor(out, x)
    return out


def _scattered(x: Tensor, _reduce_op: str, size: int, *_: object) -> Tensor:
    return rows(x, shared_rows("reduce_scatter_tensor", x, size))


def _reduce_scatter(x: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    group, out = resolve(group_name, group_size), _scattered(x, reduce_op, group_size)
    group.reduce_scatter_tensor(out, x, reduction(reduce_op))
    return out


def _exchanged(x: Tensor, received: Sequence[int], *_: object) -> Tensor:
    return rows(x, sum(received) if len(received) else x.shape[0])


def _all_to_all(
    x: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: str
) -> Tensor:
    # Empty lists stand for an even division, which is another call than that with sizes.
    sizes = list(output_split_sizes) or None, list(input_split_sizes) or None
    group = resolve(group_name) if sizes[0] is None else resolve(group_name, len(sizes[0]))
    out = _exchanged(x, output_split_sizes)
    group.all_to_all_single(out, x, *sizes)
    return out


def _permute(x: Tensor, src_dst: Sequence[int], group_name: str) -> Tensor:
    group, out, count = resolve(group_name, len(src_dst)), x.new_empty(x.shape), prod(x.shape)
    peers = src_dst[group.rank], list(src_dst).index(group.rank)
    sent, got = ([count * (rank == peer) for rank in range(group.size)] for peer in peers)
    group.all_to_all_single(out.view(-1), x.reshape(-1), got, sent)
    return out


def _gather(x: Tensor, dst: int, group_size: int, group_name: str) -> Tensor:
    group = resolve(group_name, group_size)
    out = x.new_zeros((x.shape[0] * group_size, *x.shape[1:]))
    group.gather_single(x, out if group.rank == dst else None, dst)
    return out


def _of_root(x: Tensor, _src: int, size: int, *_: object) -> Tensor:
    return rows(x, shared_rows("scatter", x, size))


def _scatter(x: Tensor, src: int, group_size: int, group_name: str) -> Tensor:
    group, out = resolve(group_name, group_size), _of_root(x, src, group_size)
    group.scatter_single(out, x if group.rank == src else None, src)
    return out


def _each(kernel: Kernel) -> Kernel:
    def on_shapes(tensors: Sequence[Tensor], *args: object) -> list[Tensor]:
        return [kernel(x, *args) for x in tensors]

    return on_shapes


def _all_reduce_coalesced(
    tensors: Sequence[Tensor], reduce_op: str, group_name: str
) -> list[Tensor]:
    group, outs, op = resolve(group_name), [copy_of(x) for x in tensors], reduction(reduce_op)
    with group.coalescing_manager():
        for out in outs:
            group.all_reduce(out, op)
    return outs


def _all_gather_coalesced(
    tensors: Sequence[Tensor], group_size: int, group_name: str
) -> list[Tensor]:
    group, outs = resolve(group_name, group_size), [_gathered(x, group_size) for x in tensors]
    with group.coalescing_manager():
        for out, x in zip(outs, tensors, strict=True):
            group.all_gather_into_tensor(out, x)
    return outs


def _reduce_scatter_coalesced(
    tensors: Sequence[Tensor], reduce_op: str, group_size: int, group_name: str
) -> list[Tensor]:
    group, op = resolve(group_name, group_size), reduction(reduce_op)
    outs = [_scattered(x, reduce_op, group_size) for x in tensors]
    with group.coalescing_manager():
        for out, x in zip(outs, tensors, strict=True):
            group.reduce_scatter_tensor(out, x, op)
    return outs


def _all_reduce_fields(
    fields: Sequence[Tensor], reduce_op: str, group_size: int, group_name: str
) -> list[Tensor]:
    outs = [copy_of(x) for x in fields]
    resolve(group_name, group_size).all_reduce(tuple(outs), reduction(reduce_op))
    return outs


def _reduce_scatter_fields(
    fields: Sequence[Tensor], reduce_op: str, group_size: int, group_name: str
) -> list[Tensor]:
    outs = [_scattered(x, reduce_op, group_size) for x in fields]
    group = resolve(group_name, group_size)
    group.reduce_scatter_tensor(tuple(outs), tuple(fields), reduction(reduce_op))
    return outs


def _barrier(group_name: str) -> None:
    resolve(group_name).barrier()


_TABLE: dict[str, tuple[Kernel, Kernel]] = {
    "all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor": (_all_reduce, same),
    # The result on `dst`, zeros elsewhere: a broadcast's gradient.
    "reduce(Tensor input, str reduce_op, int dst, int group_size, str group_name) -> Tensor": (
        _reduce,
        same,
    ),
    "broadcast(Tensor input, int src, str group_name) -> Tensor": (_broadcast, same),
    "all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor": (
        _all_gather,
        _gathered,
    ),
    "reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name) "
    "-> Tensor": (_reduce_scatter, _scattered),
    "all_to_all_single(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, "
    "str group_name) -> Tensor": (_all_to_all, _exchanged),
    "permute_tensor(Tensor input, int[] src_dst, str group_name) -> Tensor": (_permute, same),
    # Zeros on all ranks but `dst`: the gradient of `scatter`, which reads `src`'s input alone.
    "gather(Tensor input, int dst, int group_size, str group_name) -> Tensor": (
        _gather,
        lambda x, _dst, size, _name: _gathered(x, size),
    ),
    "scatter(Tensor input, int src, int group_size, str group_name) -> Tensor": (
        _scatter,
        _of_root,
    ),
    "all_reduce_coalesced(Tensor[] inputs, str reduce_op, str group_name) -> Tensor[]": (
        _all_reduce_coalesced,
        _each(same),
    ),
    "all_gather_into_tensor_coalesced(Tensor[] inputs, int group_size, str group_name) "
    "-> Tensor[]": (_all_gather_coalesced, _each(_gathered)),
    "reduce_scatter_tensor_coalesced(Tensor[] inputs, str reduce_op, int group_size, "
    "str group_name) -> Tensor[]": (_reduce_scatter_coalesced, _each(_scattered)),
    # Records with a tensor for each field.
    "all_reduce_fields(Tensor[] inputs, str reduce_op, int group_size, str group_name) "
    "-> Tensor[]": (_all_reduce_fields, _each(same)),
    "reduce_scatter_tensor_fields(Tensor[] inputs, str reduce_op, int group_size, str group_name) "
    "-> Tensor[]": (_reduce_scatter_fields, _each(_scattered)),
    "barrier(str group_name) -> ()": (_barrier, lambda *_: None),
}

for _signature, (_kernel, _fake) in _TABLE.items():
    register(_signature, _kernel, _fake)
