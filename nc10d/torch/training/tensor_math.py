"""torch's arithmetic for hooks that compute on a device: PowerSGD and quantisation.

Contract: methods and results are those of HostMath (`nc10d.reducer.hooks.array_math`), on tensors.
All work is queued on the current stream of the tensors' device; no method waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc10d.group.process_group import ProcessGroup
from nc10d.reducer.hooks.array_math import HEAD, STEPS
from nc10d.reducer.hooks.deferred_future import awaited
from nc10d.reducer.hooks.grad_bucket import GradBucket
from nc10d.torch.tensors import as_tensor
from nc10d.work import Work


class TensorMath:
    """Arithmetic on the tensors of the device of `x`."""

    def __init__(self, x: Any) -> None:
        self._device = as_tensor(x).device

    def array(self, x: Any) -> torch.Tensor:
        """Return the tensor, without its graph."""
        return as_tensor(x).detach()

    def group_of(self, group: ProcessGroup) -> Any:
        """Return the group: it reduces tensors on the device."""
        return group

    def result(self, bucket: GradBucket) -> Any:
        """Return the bucket's buffer, in whose memory the results are."""
        return bucket.buffer()

    def wide(self, arrays: Sequence[torch.Tensor]) -> torch.dtype:
        """Return float32, or float64 if a tensor has it."""
        return torch.float64 if any(x.dtype == torch.float64 for x in arrays) else torch.float32

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros."""
        return torch.zeros(count, dtype=dtype, device=self._device)

    def copy(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a copy, in another dtype if one is given."""
        return x.to(dtype or x.dtype, copy=True)

    def joined(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a flat copy of all tensors."""
        return torch.cat([x.reshape(-1) for x in arrays]) if arrays else self.zeros(0, torch.float)

    def fill(self, columns: torch.Tensor, values: Any) -> None:
        """Replace columns of zeros by those of `values`, an array of the host."""
        given = torch.from_numpy(values).to(columns, non_blocking=True)
        columns.copy_(torch.where((columns != 0).any(0), columns, given))

    def length(self, column: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the length of a column plus `epsilon`, or 1 if that is zero."""
        found = torch.linalg.vector_norm(column) + epsilon
        return torch.where(found == 0, torch.ones_like(found), found)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product of two matrices."""
        torch.matmul(a, b, out=out)

    def after(self, bucket: GradBucket, works: Sequence[Work], step: Callable[[], Any]) -> Any:
        """Return the Future of `step()`, which the waiting thread queues behind all Works."""
        first, *rest = works

        def end(value: Callable[[], Any]) -> Any:
            value()
            for work in rest:
                awaited(work)
            return step()

        return bucket.following(first, end)

    def messages(self, count: int, nbytes: int) -> torch.Tensor:
        """Return memory for as many messages."""
        return torch.zeros((count, nbytes), dtype=torch.uint8, device=self._device)

    def encode(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """Return values in 8 bits, in channels of `width` elements."""
        count = values.numel()
        channels = -(-count // width)
        rows = self.zeros(channels * width, torch.float32)
        rows[:count] = values
        rows = rows.reshape(channels, width)
        low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
        scale = (high - low) / STEPS
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        zero = torch.round(-low / scale).clamp(0, STEPS)
        codes = (torch.round(rows / scale[:, None]) + zero[:, None]).clamp(0, STEPS)
        head = torch.stack([scale, zero], 1).view(torch.uint8)
        return torch.cat([head.reshape(-1), codes.to(torch.uint8).reshape(-1)[:count]])

    def decode(self, message: torch.Tensor, count: int, width: int) -> torch.Tensor:
        """Return the `count` float32 values of a message."""
        channels = -(-count // width)
        # The message of another rank begins anywhere: a copy can be viewed as floats.
        head = message[: HEAD * channels].clone().view(torch.float32).reshape(-1, 2)
        codes = message[HEAD * channels :].to(torch.float32)
        scale, zero = (x.repeat_interleave(width)[:count] for x in (head[:, 0], head[:, 1]))
        return (codes - zero) * scale
