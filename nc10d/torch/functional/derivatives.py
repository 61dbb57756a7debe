"""Gradients for the operators `nc10d::*`, and their rules for vmap.

Contract: a gradient is that of the sum of all ranks' losses, as in torch.distributed.nn. Every rank
that makes a call forward makes the call backward, so all ranks must run the backward pass. A
reduction without a gradient (max, product, ...) raises a NotImplementedError in the backward pass.
vmap runs the operator once for all samples; a message below vmap is a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from nc10d.torch.functional.operators import library

if TYPE_CHECKING:
    from torch._functorch.autograd_function import VmapInfo

_functorch = torch._C._functorch
_DIFFERENTIATING = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)
Formula = Callable[..., Any]

_LINEAR = ("sum", "avg", "premul_sum(")


def call(name: str, x: Tensor | Sequence[Tensor], *args: object) -> Any:
    """Call an operator; below a transform of torch.func or forward-mode AD, as they need it."""
    if torch.compiler.is_compiling() or not transformed():
        return getattr(torch.ops.nc10d, name)(x, *args)
    if isinstance(x, Tensor):
        return _Transformed.apply(name, args, x)
    return list(_Transformed.apply(name, args, *x))


def transformed() -> bool:
    """Return whether torch.func or forward-mode AD is computing a gradient."""
    innermost = _functorch.peek_interpreter_stack()
    if innermost is not None:
        return innermost.key() in _DIFFERENTIATING
    level: int = forward_ad._current_level
    return level >= 0 and torch._C._is_fwd_grad_enabled()  # not within a Function's forward


def _linear(call: str, op: str) -> str:
    """Return the reduction, whose gradient is the reduction itself; else NotImplementedError."""
    if not op.startswith(_LINEAR):
        raise NotImplementedError(
            f"{call}: a reduction {op!r} has no gradient: call it with x.detach(), or use 'sum', "
            "'avg' or premul_sum"
        )
    return op


def _all_reduce(grad: Tensor, op: str, name: str) -> Tensor:
    return call("all_reduce", grad, _linear("all_reduce", op), name)


def _reduce(grad: Tensor, op: str, dst: int, size: int, name: str) -> Tensor:
    return _times(call("broadcast", grad, dst, name), _linear("reduce", op), size)


def _broadcast(grad: Tensor, src: int, name: str) -> Tensor:
    # A sum needs no group size, by which only a mean divides.
    return call("reduce", grad, "sum", src, 0, name)


def _all_gather(grad: Tensor, size: int, name: str) -> Tensor:
    return call("reduce_scatter_tensor", grad, "sum", size, name)


def _reduce_scatter(grad: Tensor, op: str, size: int, name: str) -> Tensor:
    gathered = call("all_gather_into_tensor", grad, size, name)
    return _times(gathered, _linear("reduce_scatter_tensor", op), size)


def _all_to_all(grad: Tensor, received: Sequence[int], sent: Sequence[int], name: str) -> Tensor:
    return call("all_to_all_single", grad, sent, received, name)


def _permute(grad: Tensor, src_dst: Sequence[int], name: str) -> Tensor:
    back = sorted(range(len(src_dst)), key=src_dst.__getitem__)
    return call("permute_tensor", grad, back, name)


def _gather(grad: Tensor, dst: int, size: int, name: str) -> Tensor:
    return call("scatter", grad, dst, size, name)


def _scatter(grad: Tensor, src: int, size: int, name: str) -> Tensor:
    return call("gather", grad, src, size, name)


def _all_reduce_each(grads: list[Tensor], op: str, name: str) -> list[Tensor]:
    return call("all_reduce_coalesced", grads, _linear("all_reduce_coalesced", op), name)


def _all_gather_each(grads: list[Tensor], size: int, name: str) -> list[Tensor]:
    return call("reduce_scatter_tensor_coalesced", grads, "sum", size, name)


def _reduce_scatter_each(grads: list[Tensor], op: str, size: int, name: str) -> list[Tensor]:
    _linear("reduce_scatter_tensor_coalesced", op)
    gathered = call("all_gather_into_tensor_coalesced", grads, size, name)
    return [_times(x, op, size) for x in gathered]


def _times(x: Tensor, op: str, size: int) -> Tensor:
    """Multiply a gradient by a contribution's weight in a linear reduction."""
    if op == "avg":
        return x / size
    return x if op == "sum" else x * float(op.partition("(")[2][:-1])


_FORMULAS: dict[str, Formula] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "permute_tensor": _permute,
    "gather": _gather,
    "scatter": _scatter,
    "all_reduce_coalesced": _all_reduce_each,
    "all_gather_into_tensor_coalesced": _all_gather_each,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_each,
    "all_reduce_fields": lambda _, op, *more: _linear("all_reduce", op),
    "reduce_scatter_tensor_fields": lambda _, op, *more: _linear("reduce_scatter_tensor", op),
}
_BY_ROWS = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "gather"}
_BY_ROWS |= {"scatter", "reduce_scatter_tensor_fields"}
_BY_ROWS |= {"all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}
"""Operators for which dimension 0 has a meaning: vmap's samples move to dimension 1."""


def _keep_arguments(ctx: FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
    ctx.arguments = inputs[1:]


def _backward(formula: Formula) -> Formula:
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return formula(grad, *ctx.arguments), *[None] * len(ctx.arguments)

    return backward


def _batched(
    name: str, info: VmapInfo, dims: Sequence[int | None], xs: Sequence[Tensor]
) -> tuple[list[Tensor], int]:
    """Return tensors with their samples in a dimension, and this dimension."""
    dim = int(name in _BY_ROWS)
    pairs = zip(xs, dims, strict=True)
    return [_samples(x, own, dim, info.batch_size) for x, own in pairs], dim


def _rule(name: str) -> Callable[..., object]:
    def rule(
        info: VmapInfo, in_dims: tuple[Any, ...], x: Tensor | Sequence[Tensor], *args: object
    ) -> tuple[object, object]:
        single = isinstance(x, Tensor)
        whole, dim = _batched(
            name, info, in_dims[:1] if single else in_dims[0], [x] if single else x
        )
        out = call(name, whole[0] if single else whole, *args)
        return out, dim if single else [dim] * len(x)

    return rule


def _samples(x: Tensor, own: int | None, dim: int, count: int) -> Tensor:
    if own is None:
        return x.unsqueeze(dim).expand(*x.shape[:dim], count, *x.shape[dim:])
    return x.movedim(own, dim)


def _is_several(name: str) -> bool:
    return name.endswith(("_coalesced", "_fields"))


class _Transformed(torch.autograd.Function):
    """An operator on one tensor or several, for transforms: `register_autograd` makes no such."""

    @staticmethod
    def forward(name: str, args: tuple[object, ...], *xs: Tensor) -> Tensor | tuple[Tensor, ...]:
        out = call(name, list(xs) if _is_several(name) else xs[0], *args)
        return tuple(out) if isinstance(out, list) else out

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: object) -> None:
        ctx.name, ctx.arguments, *_ = inputs

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        several = _is_several(ctx.name)
        found = _FORMULAS[ctx.name](list(grads) if several else grads[0], *ctx.arguments)
        return (None, None, *(found if several else (found,)))

    @staticmethod
    def jvp(
        ctx: FunctionCtx, _name: None, _args: None, *tangents: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        several = _is_several(ctx.name)
        if "reduce" in ctx.name:
            _linear(ctx.name, ctx.arguments[0])
        out = call(ctx.name, list(tangents) if several else tangents[0], *ctx.arguments)
        return tuple(out) if several else out

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: tuple[Any, ...], name: str, args: tuple[object, ...], *xs: Tensor
    ) -> tuple[object, object]:
        whole, dim = _batched(name, info, in_dims[2:], xs)
        out = _Transformed.apply(name, args, *whole)
        return out, (dim,) * len(xs) if isinstance(out, tuple) else dim


for _name, _formula in _FORMULAS.items():
    torch.library.register_autograd(
        f"nc10d::{_name}", _backward(_formula), setup_context=_keep_arguments, lib=library
    )
    torch.library.register_vmap(f"nc10d::{_name}", _rule(_name), lib=library)
