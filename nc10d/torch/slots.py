"""Move a parameter's gradient into the Reducer, and the mean back: by a bucket's slot, or by rows.

Contract: `move` copies the accumulated `x.grad` to its slot, divided if compiled code copies, or
returns an array that the Reducer copies to the slot and back. `fill` copies it, undivided. `give`
writes the mean to `x.grad`, or returns the (target, source) of a copy, which `write_means` makes.
Compiled code copies only between plain CPU tensors with one dtype, shape and layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeGuard

import torch

from nc10d.arrays.buffer import as_buffer
from nc10d.ops import Array
from nc10d.reducer.buckets.bucket import Allocation
from nc10d.reducer.gradients import SparseGradient, assign, no_rows
from nc10d.reducer.packing import DividedCopy, Row, copy_all
from nc10d.reducer.plan import Spec
from nc10d.torch.tensors import DTYPES, as_numpy, as_tensor, like, zeros

Copy = tuple[torch.Tensor, torch.Tensor]
_HOST = torch.device("cpu")
_STRIDED = torch.strided
Moved = tuple[torch.Tensor | None, bool]
"""An array that the Reducer has to copy, if any, and whether the gradient is divided already."""
MOVED = {"cuda"}
"""Device types where buckets are tensors, and the Reducer copies gradients into them."""


class Dense:
    """The slot for `x` in a bucket; `view` has the shape and strides of `x`.

    With `as_view`, `x.grad` is another view of the slot after the first pass. With `past`, copies
    into the bucket bypass the CPU caches.
    """

    def __init__(self, x: torch.Tensor, gradient: Array, as_view: bool, past: bool = False) -> None:
        self.view = like(as_tensor(gradient.reshape(-1)), x)
        self.as_view = as_view
        # The view in `x.grad`: `x.grad.data = y` gives other memory to that view, not to `view`.
        self._shown: torch.Tensor | None = None
        self._shape, self._stride = self.view.shape, self.view.stride()
        self._memory = self.view.data_ptr(), self.view.nbytes
        # A view accumulates. The Reducer copies on devices.
        plain = x.is_cpu and x.is_floating_point() and not as_view
        self._divided_copy = DividedCopy(as_buffer(self.view), past) if plain else None

    def move(self, x: torch.Tensor, divisor: int, again: bool) -> Moved:
        """Copy the gradient of `x` into the bucket, divided by `divisor` where that costs nothing.

        0 is no divisor. `again` says that the gradient has come in this pass before.
        """
        grad, copy = x.grad, self._divided_copy
        if divisor and copy is not None and self._is_alike(grad):
            address = grad.data_ptr()
            # A gradient that is its own slot may be marked again: the bucket divides it at the
            # launch.
            if address != self._memory[0]:
                copy.write(address, divisor)
                return None, True
        self.fill(x)
        return None, False

    def _is_alike(self, grad: Any) -> TypeGuard[torch.Tensor]:
        """Return whether the gradient has memory, and elements laid out as `view`'s."""
        # A parameter's data may have been replaced. A ZeroTensor has no memory.
        return (
            type(grad) is torch.Tensor
            and grad.dtype is self.view.dtype
            and grad.layout is _STRIDED
            and grad.is_cpu
            and grad.shape == self._shape
            and grad.stride() == self._stride
            and not (grad.is_neg() or grad._is_zerotensor())
        )

    def fill(self, x: torch.Tensor) -> None:
        """Copy the gradient of `x` into the bucket, or zeros without a gradient."""
        grad = x.grad
        if grad is None:
            self.view.zero_()
        elif grad is not self._shown or not self.view.is_set_to(grad):
            self.view.copy_(grad.detach() if grad.requires_grad else grad)
            if self.as_view:
                x.grad = self._show()

    def _show(self) -> torch.Tensor:
        """Return a view of the slot for the user."""
        shown = self._shown
        if shown is None or not shown.is_set_to(self.view):
            shown = self._shown = self.view.detach()
        return shown

    def accumulate(self, x: torch.Tensor) -> None:
        """Leave an unreduced pass's gradient where autograd has accumulated it."""

    def give(self, x: torch.Tensor) -> Copy | None:
        """Set the gradient of `x` to the mean, or return the copy that does so."""
        grad = x.grad
        if grad is None:  # only other ranks used the parameter
            x.grad = self._show() if self.as_view else self.view.clone()
            return None
        if grad is self._shown and self.view.is_set_to(grad):
            return None
        return grad.detach() if grad.requires_grad else grad, self.view

    def row(self, target: torch.Tensor) -> Row | None:
        """Return (target, source, bytes) for copying the view to a tensor with the same layout."""
        source, nbytes = self._memory
        plain = self._divided_copy is not None and not target.requires_grad
        return (target.data_ptr(), source, nbytes) if plain and self._is_alike(target) else None


def write_means(slots: Iterable[tuple[Dense | Sparse, torch.Tensor]]) -> None:
    """Write each slot's mean to the gradient of its tensor; see `give`."""
    rows, written, copies = [], [], []
    for slot, x in slots:
        copy = slot.give(x)
        if copy is None or isinstance(slot, Sparse):
            continue
        row = slot.row(copy[0])
        if row is not None:
            rows.append(row)
            written.append(copy[0])
        elif copy[0].is_neg():  # _foreach_copy_ refuses lazy negatives
            copy[0].copy_(copy[1])
        else:
            copies.append(copy)
    if rows:
        copy_all(rows)
        torch.autograd.graph.increment_version(written)
    if copies:
        torch._foreach_copy_(*zip(*copies, strict=True))


class Cast(Dense):
    """The slot for a low-precision copy `x` of the parameter `target`, which has the gradient.

    `x.grad` is there only from autograd's end until the gradient is taken. A static graph may use
    `x` several times in a pass: each use has a separate gradient then.
    """

    def __init__(self, x: torch.Tensor, gradient: Array, target: torch.Tensor, past: bool) -> None:
        super().__init__(x, gradient, False, past)
        self._target, self._divided_by = target, 1

    def move(self, x: torch.Tensor, divisor: int, again: bool) -> Moved:
        """Copy the gradient of `x` into the bucket, or add the pass's next gradient there."""
        if again:
            if (own := self._taken(x)) is not None:
                self.view.add_(own, alpha=1 / self._divided_by)
            return None, self._divided_by > 1
        _, divided = super().move(x, 0 if self._target.grad is not None else divisor, again)
        self._divided_by = divisor if divided else 1
        if divided:
            x.grad = None
        return None, divided

    def fill(self, x: torch.Tensor) -> None:
        """Copy the gradient of `x` to the bucket, with the gradients accumulated before."""
        own, before = self._taken(x), self._target.grad
        if own is None:
            self.view.zero_() if before is None else self.view.copy_(before)
        elif before is None:
            self.view.copy_(own)
        else:
            self.view.copy_(before + own)

    def give(self, x: torch.Tensor) -> Copy | None:
        """Set the target's gradient to the mean, or return the copy that does so."""
        target = self._target
        if target.grad is None:
            target.grad = self.view.to(target.grad_dtype or target.dtype, copy=True)
            return None
        return target.grad.detach(), self.view

    def accumulate(self, x: torch.Tensor) -> None:
        """Add the gradient of `x` to the target's, in a pass that is not reduced."""
        own, target = self._taken(x), self._target
        if own is None:
            return
        if target.grad is None:
            target.grad = own.to(target.grad_dtype or target.dtype)
        else:
            target.grad.add_(own)

    @staticmethod
    def _taken(x: torch.Tensor) -> torch.Tensor | None:
        own, x.grad = x.grad, None
        return None if own is None else own.detach()


class OnDevice(Dense):
    """A slot on a device: the Reducer copies all gradients in a bucket in a single launch."""

    def __init__(self, x: torch.Tensor, gradient: Array) -> None:
        super().__init__(x, gradient, False)
        self._flat = gradient.shape, gradient.stride()
        self._passed = False

    def move(self, x: torch.Tensor, divisor: int, again: bool) -> Moved:
        """Return the gradient of `x` as a flat view if dtype and strides match, else copy it."""
        grad = x.grad
        if grad is None or grad.dtype is not self.view.dtype or grad.stride() != self._stride:
            return super().move(x, 0, again)
        self._passed = True
        return grad.detach().as_strided(*self._flat), False

    def fill(self, x: torch.Tensor) -> None:
        """Copy the gradient of `x` into the bucket, also after a failed pass."""
        self._passed = False
        super().fill(x)

    def give(self, x: torch.Tensor) -> Copy | None:
        """Set the gradient of `x` to the mean, unless the Reducer has done so."""
        passed, self._passed = self._passed, False
        return None if passed else super().give(x)


class Sparse:
    """An embedding gradient's rows, which have no slot in a bucket."""

    as_view = False

    def __init__(self, gradient: SparseGradient) -> None:
        self._gradient = gradient

    def move(self, x: torch.Tensor, _divisor: int, _again: bool) -> Moved:
        """Pass the rows of `x` to the Reducer, undivided: every rank divides all ranks' rows."""
        self.fill(x)
        return None, False

    def fill(self, x: torch.Tensor) -> None:
        """Pass the rows of the gradient of `x` to the Reducer; no rows without a gradient."""
        assign(self._gradient, _no_rows(x) if x.grad is None else as_rows(x.grad))

    def accumulate(self, x: torch.Tensor) -> None:
        """Leave an unreduced pass's gradient where autograd has accumulated it."""

    def give(self, x: torch.Tensor) -> None:
        """Set the gradient of `x` to the rows that the hook returned."""
        x.grad = as_sparse(self._gradient, x)


def slot_of(
    x: torch.Tensor, gradient: torch.Tensor | Array, target: torch.Tensor, as_view: bool, past: bool
) -> Dense | Sparse:
    """Return the slot for the leaf `x` of parameter `target`; `gradient` is the Reducer's."""
    if isinstance(gradient, SparseGradient):
        return Sparse(gradient)
    if x is not target:
        return Cast(x, gradient, target, past)
    same = as_tensor(gradient.reshape(-1)).dtype is x.dtype
    if x.device.type in MOVED and same and not as_view:
        return OnDevice(x, gradient)
    return Dense(x, gradient, as_view and same, past)


def allocation(params: Iterable[torch.Tensor]) -> Allocation:
    """Return allocators for buckets on devices; the CPU has the Reducer's default memory."""
    devices = {x.device for x in params if x.device.type in MOVED}
    return {str(device): partial(zeros, device=device) for device in devices} or None


def as_rows(x: torch.Tensor) -> SparseGradient:
    """Return a sparse tensor's rows (COO) in host memory.

    Contiguous rows on the CPU are not copied. For rows on a device the host waits.
    """
    places, rows = x._indices().to(_HOST), x._values().detach().to(_HOST)
    return SparseGradient(as_numpy(places.contiguous()), as_numpy(rows.contiguous()))


def as_sparse(gradient: SparseGradient, x: torch.Tensor) -> torch.Tensor:
    """Return rows as a sparse tensor with the shape and device of `x`; no copy on the CPU."""
    return torch.sparse_coo_tensor(
        as_tensor(gradient.indices).to(x.device),
        as_tensor(gradient.values).to(x.device),
        x.shape,
        is_coalesced=_in_order(gradient.indices),
        check_invariants=False,  # the Reducer has checked every rank's rows
    )


def _no_rows(x: torch.Tensor) -> SparseGradient:
    return no_rows(Spec(tuple(x.shape), DTYPES[x.dtype], x.device.type))


def _in_order(places: Array) -> bool:
    """Return True if places are sorted and unique; checks only rows with a single index."""
    return len(places) == 1 and bool((places[0, 1:] > places[0, :-1]).all())
