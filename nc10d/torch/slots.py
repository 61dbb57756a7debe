"""Where a parameter's gradient goes in, and where its mean comes out: a place in a bucket, or rows.

Contract: `take` moves what has accumulated in `x.grad` to the Reducer; `give` puts the mean there,
or returns the (target, source) of a copy that the caller makes, so that many go in one call.
"""

from __future__ import annotations

import torch

from nc10d.ops import Array
from nc10d.reducer.gradients import SparseGradient
from nc10d.torch.tensors import as_numpy, as_tensor, like

Copy = tuple[torch.Tensor, torch.Tensor]


class Dense:
    """The place of `x` in a bucket: `view` has its shape and strides.

    With `as_view`, `x.grad` is that view after the first pass.
    """

    def __init__(self, x: torch.Tensor, gradient: Array, as_view: bool) -> None:
        self.view = like(as_tensor(gradient.reshape(-1)), x)
        self.as_view = as_view

    def take(self, x: torch.Tensor) -> None:
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


class Sparse:
    """The rows of an embedding's gradient, which have no place in a bucket."""

    as_view = False

    def __init__(self, gradient: SparseGradient) -> None:
        self._gradient = gradient

    def take(self, x: torch.Tensor) -> None:
        """Show the Reducer the rows of the gradient of `x`; none if it has none."""
        grad = x.grad
        rows = torch.empty(0, *x.shape[1:], dtype=x.dtype) if grad is None else grad._values()
        places = torch.empty(1, 0, dtype=torch.int64) if grad is None else grad._indices()
        self._gradient.indices = as_numpy(places.contiguous())
        self._gradient.values = as_numpy(rows.detach().contiguous())

    def give(self, x: torch.Tensor) -> None:
        """Let the gradient of `x` be the mean's rows, each place once."""
        places, rows = self._gradient.indices, self._gradient.values
        x.grad = torch.sparse_coo_tensor(
            as_tensor(places),
            as_tensor(rows),
            x.shape,
            is_coalesced=True,
            check_invariants=False,  # the Reducer has checked the rows of every rank
        )
