"""torch's arithmetic for hooks that compute on a device: PowerSGD and quantisation.

Contract: all work is queued on the current stream of the tensors' device; no method waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from nc10d.ops import Array
from nc10d.reducer.hooks.array_math import ArrayMath
from nc10d.reducer.hooks.deferred_future import awaited
from nc10d.reducer.hooks.grad_bucket import GradBucket
from nc10d.torch.tensors import as_tensor
from nc10d.work import Future, Work

T = TypeVar("T")


class TensorMath(ArrayMath):
    """Arithmetic on tensors that are on the device of `x`."""

    xp = torch

    def __init__(self, x: Array) -> None:
        self._device = as_tensor(x).device

    def array(self, x: Array) -> torch.Tensor:
        """Return the tensor, without its graph."""
        return as_tensor(x).detach()

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros on the device."""
        return torch.zeros(count, dtype=dtype, device=self._device)

    def copy(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a copy, in another dtype if one is given."""
        return x.to(dtype or x.dtype, copy=True)

    def fill(self, columns: torch.Tensor, values: torch.Tensor | float) -> None:
        """Replace columns of zeros by the columns of `values`, a host array."""
        super().fill(columns, torch.from_numpy(values).to(columns, non_blocking=True))

    def after(self, bucket: GradBucket, works: Sequence[Work], step: Callable[[], T]) -> Future[T]:
        """Return the Future for `step()`, which the waiting thread queues behind all Works."""
        first, *rest = works

        def end(value: Callable[[], object]) -> T:
            value()
            for work in rest:
                awaited(work)
            return step()

        return bucket.following(first, end)
