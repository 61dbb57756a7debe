"""Where a parameter's gradient goes in, and where its mean comes out: a place in a bucket, or rows.

Contract: `take` moves what has accumulated in `x.grad` to its place, or returns the array that the
Reducer is to move there and back; `fill` moves it there in any case. `give` puts the mean into
`x.grad`, or returns the (target, source) of a copy that the caller makes, so that many go in one
call.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from nc10d.ops import Array
from nc10d.reducer.buckets.bucket import Allocation
from nc10d.reducer.gradients import SparseGradient, assign, no_rows
from nc10d.reducer.plan import Spec
from nc10d.torch.tensors import DTYPES, as_numpy, as_tensor, like, zeros

Copy = tuple[torch.Tensor, torch.Tensor]
MOVED = {"cuda"}
"""Kinds of devices where buckets are tensors, and the Reducer moves gradients into them."""


class Dense:
    """The place of `x` in a bucket: `view` has its shape and strides.

    With `as_view`, `x.grad` is that view after the first pass.
    """

    def __init__(self, x: torch.Tensor, gradient: Array, as_view: bool) -> None:
        self.view = like(as_tensor(gradient.reshape(-1)), x)
        self.as_view = as_view

    def take(self, x: torch.Tensor) -> torch.Tensor | None:
        """Copy the gradient of `x` into the bucket; return what the Reducer is to move instead."""
        self.fill(x)
        return None

    def fill(self, x: torch.Tensor) -> None:
        """Copy the gradient of `x` into the bucket, zeros if it has none."""
        grad = x.grad
        if grad is None:
            self.view.zero_()
        elif grad is not self.view:
            self.view.copy_(grad.detach() if grad.requires_grad else grad)
            if self.as_view:
                x.grad = self.view

    def give(self, x: torch.Tensor) -> Copy | None:
        """Let the gradient of `x` be the mean."""
        grad = x.grad
        if grad is self.view:
            return None
        if grad is None:  # of use on another rank only
            x.grad = self.view if self.as_view else self.view.clone()
            return None
        return grad.detach(), self.view


class Moved(Dense):
    """A place on a device: the Reducer moves all gradients of a bucket by one launch."""

    def __init__(self, x: torch.Tensor, gradient: Array) -> None:
        super().__init__(x, gradient, False)
        self._flat = gradient.shape, gradient.stride()
        self._lent = False

    def take(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the memory of the gradient of `x`, if it lies as the place does; else copy it."""
        grad = x.grad
        self._lent = grad is not None and grad.stride() == self.view.stride()
        if not self._lent:
            return super().take(x)
        return grad.detach().as_strided(*self._flat)

    def fill(self, x: torch.Tensor) -> None:
        """Copy the gradient of `x` into the bucket, whatever became of the last pass."""
        self._lent = False
        super().fill(x)

    def give(self, x: torch.Tensor) -> Copy | None:
        """Let the gradient of `x` be the mean, which it is if the Reducer has moved it."""
        lent, self._lent = self._lent, False
        return None if lent else super().give(x)


class Sparse:
    """The rows of an embedding's gradient, which have no place in a bucket."""

    as_view = False

    def __init__(self, gradient: SparseGradient) -> None:
        self._gradient = gradient

    def take(self, x: torch.Tensor) -> None:
        """Do as `fill`."""
        self.fill(x)

    def fill(self, x: torch.Tensor) -> None:
        """Show the Reducer the rows of the gradient of `x`; none if it has none."""
        assign(self._gradient, _no_rows(x) if x.grad is None else as_rows(x.grad))

    def give(self, x: torch.Tensor) -> None:
        """Let the gradient of `x` be the rows that the hook has ended with: the mean's, say."""
        x.grad = as_sparse(self._gradient, x)


def slot_of(x: torch.Tensor, gradient: Any, as_view: bool) -> Dense | Sparse:
    """Return the slot of a parameter whose gradient the Reducer keeps so."""
    if isinstance(gradient, SparseGradient):
        return Sparse(gradient)
    if x.device.type in MOVED and not as_view:
        return Moved(x, gradient)
    return Dense(x, gradient, as_view)


def allocation(params: Iterable[torch.Tensor]) -> Allocation:
    """Return what makes buckets: tensors on devices; on the CPU the Reducer knows better memory."""
    devices = {x.device for x in params if x.device.type in MOVED}
    return {str(device): partial(zeros, device=device) for device in devices} or None


def as_rows(x: torch.Tensor) -> SparseGradient:
    """Return the rows of a sparse tensor (COO), in the same memory where that is contiguous."""
    places, rows = x._indices(), x._values()
    return SparseGradient(as_numpy(places.contiguous()), as_numpy(rows.detach().contiguous()))


def as_sparse(gradient: SparseGradient, x: torch.Tensor) -> torch.Tensor:
    """Return rows as a sparse tensor of the shape of `x`, in the same memory."""
    return torch.sparse_coo_tensor(
        as_tensor(gradient.indices),
        as_tensor(gradient.values),
        x.shape,
        is_coalesced=_in_order(gradient.indices),
        check_invariants=False,  # the Reducer has checked the rows of every rank
    )


def _no_rows(x: torch.Tensor) -> SparseGradient:
    return no_rows(Spec(tuple(x.shape), DTYPES[x.dtype], x.device.type))


def _in_order(places: Array) -> bool:
    """Say whether each place is there once, in order; others may be, where it takes longer."""
    return len(places) == 1 and bool((places[0, 1:] > places[0, :-1]).all())
