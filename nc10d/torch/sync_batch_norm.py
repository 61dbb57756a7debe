"""Batch normalisation by the statistics over all ranks' batches, on the CPU and on GPUs.

    model = nc10d.torch.SyncBatchNorm.convert_sync_batchnorm(model)

Contract: outputs, running statistics and gradients equal BatchNorm's on all ranks' batches put
together, up to rounding. Ranks' batches may differ in size, and be empty; if all are empty, running
statistics stay unchanged. A forward pass in training makes an all_gather, the backward pass an
all_reduce; every rank makes both, in the order of the module's layers, which is the same on all
ranks.
"""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from nc10d.group.process_group import ProcessGroup
from nc10d.torch.backend.groups import AnyGroup, has_default_group, own_group
from nc10d.torch.compiling import in_python


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm on an nc10d group, or a torch group with the backend "nc10d".

    `process_group` None is the default group, nc10d's if there is one.

    Constructor, attributes and state are torch's. Without a group, with a single rank, and in
    evaluation the layer is BatchNorm. Parameters' gradients are this rank's part, as in torch:
    DistributedDataParallel averages them. Blocks in forward and backward passes during training.
    """

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: AnyGroup | None = None
    ) -> torch.nn.Module:
        """Replace each BatchNorm layer in `module`, which keeps its parameters and buffers."""
        converted = super().convert_sync_batchnorm(module, process_group)
        for layer in converted.modules():
            if type(layer) is torch.nn.SyncBatchNorm:
                layer.__class__ = cls
        return converted

    def _own_group(self) -> ProcessGroup | None:
        given = self.process_group is not None
        return own_group(self.process_group) if given or has_default_group() else None

    @in_python
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input`, with shape (batch, channels, ...)."""
        group = self._own_group() if self.training else None
        if group is None or group.size() == 1:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        output, mean, variance, total = _Normalise.apply(
            input, self.weight, self.bias, self.eps, group
        )
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
            new = self.momentum
            if new is None:  # the mean over all batches so far
                new = 1.0 / float(self.num_batches_tracked)
            for running, value in ((self.running_mean, mean), (self.running_var, variance)):
                kind = running.dtype
                running.lerp_(value.to(kind), (total > 0).to(kind) * new)
        return output


class _Normalise(torch.autograd.Function):
    """Normalise x by the mean and the variance over all ranks.

    Return the result, mean, variance, and the number of values in a channel.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: ProcessGroup,
    ) -> tuple[torch.Tensor, ...]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        channels, count = x.size(1), x.numel() // x.size(1)
        part = wide.new_zeros(2 * channels + 1)
        part[-1] = count
        if count:
            variance, mean = torch.var_mean(wide, dims, correction=0)
            part[:channels], part[channels:-1] = mean, variance * count
        parts = part.new_empty(group.size(), part.numel())
        group.all_gather_into_tensor(parts, part)
        means, squares, counts = parts[:, :channels], parts[:, channels:-1], parts[:, -1:]
        # Deviations from each rank's mean, then of these means: sums of squares would cancel.
        total = counts.sum()
        divisor = total.clamp(min=1)
        mean = (means * counts).sum(0) / divisor
        deviations = (squares + counts * (means - mean) ** 2).sum(0)
        scale = torch.rsqrt(deviations / divisor + eps)
        ctx.group, ctx.dims, ctx.has_bias = group, dims, bias is not None
        ctx.save_for_backward(x, weight, mean, scale, divisor)
        output = (wide - _column(mean, x)) * _column(scale, x)
        if weight is not None:
            output = output * _column(weight, x)
        if bias is not None:
            output = output + _column(bias, x)
        variance = deviations / (total - 1).clamp(min=1)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    @once_differentiable  # autograd does not see a second derivative's reduction
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, divisor = ctx.saved_tensors
        given = gradients[0].to(mean.dtype)
        normal = (x.to(mean.dtype) - _column(mean, x)) * _column(scale, x)
        channels = mean.numel()
        sums = torch.cat([given.sum(ctx.dims), (given * normal).sum(ctx.dims)])
        own = sums.clone()
        ctx.group.all_reduce(sums)
        shift, slope = sums[:channels] / divisor, sums[channels:] / divisor
        inner = given - _column(shift, x) - normal * _column(slope, x)
        inner = inner * _column(scale if weight is None else scale * weight, x)
        to_weight = None if weight is None else own[channels:].to(weight.dtype)
        to_bias = own[:channels].to(mean.dtype if weight is None else weight.dtype)
        return inner.to(x.dtype), to_weight, to_bias if ctx.has_bias else None, None, None


def _column(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return channels' values in a shape that broadcasts against `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
