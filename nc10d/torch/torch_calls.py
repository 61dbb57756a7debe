"""A group of nc10d as torch.distributed's functions see it, so that torch's own comm hooks run.

    model.register_comm_hook(nc10d.get_default_group(), torch_hooks.fp16_compress_hook)

Such a hook calls `torch.distributed.all_reduce(x, group=state)`, which calls the group's method
`allreduce` with a list of tensors and options. These are the methods that torch's hooks need; they
launch and return a LaunchedCall. Its Future makes progress inside a wait only, as the Reducer has
it at the end of a pass, in the order of buckets. So a callback may launch another reduction, as
PowerSGD does: every rank launches it at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc10d.base.deadline import Timeout
from nc10d.group.collectives import Collectives
from nc10d.ops import RedOp, ReduceOp
from nc10d.reducer.hooks.deferred_future import OrderedFuture
from nc10d.reducer.hooks.grad_bucket import require_work
from nc10d.work import Future, Work


def register() -> None:
    """Give groups the methods that torch.distributed's functions call."""
    for method in (allreduce, allgather):
        setattr(Collectives, method.__name__, method)


class LaunchedCall:
    """The Work of a call as torch's hooks use it; `value` is that of its Future."""

    def __init__(self, work: Work | None, value: Any) -> None:
        self.work = require_work(work)
        self._value = value

    def wait(self, timeout: Timeout = None) -> Any:
        """Wait for the Work; see Work.wait."""
        return self.work.wait(timeout)

    def get_future(self) -> Future[Any]:
        """Return a Future of the value, which a wait for it completes."""

        def end(value: Callable[[], Any]) -> Any:
            value()  # raises the error of the Work
            return self._value

        return OrderedFuture(self.work, end)


def allreduce(group: Collectives, tensors: Sequence[torch.Tensor], options: Any) -> LaunchedCall:
    """Launch the reduction of a single tensor in place."""
    (tensor,) = tensors
    work = group.all_reduce(tensor, _op(options.reduceOp), async_op=True)
    return LaunchedCall(work, [tensor])


def allgather(
    group: Collectives,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    _options: Any,
) -> LaunchedCall:
    """Launch the gathering of every rank's tensor."""
    (output,), (tensor,) = outputs, inputs
    return LaunchedCall(group.all_gather(output, tensor, async_op=True), [output])


def _op(op: Any) -> ReduceOp:
    """Return nc10d's reduction for torch's; TypeError if it has a factor, which torch hides."""
    kind = RedOp[getattr(op, "op", op).name]
    if kind is RedOp.PREMUL_SUM:
        raise TypeError("torch's PREMUL_SUM hides its factor: give nc10d.premul_sum(factor)")
    return ReduceOp(kind)
