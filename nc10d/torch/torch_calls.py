"""An nc10d group as torch.distributed's functions see it, so that torch's own comm hooks run.

    model.register_comm_hook(nc10d.get_default_group(), torch_hooks.fp16_compress_hook)

Such a hook calls `torch.distributed.all_reduce(x, group=state)`, which calls the group's method
`allreduce` with a list of tensors and options. These are the methods that torch's hooks need; they
launch and return a LaunchedCall. Its Future makes progress inside a wait only, as the Reducer waits
when a pass ends, in bucket order. So a callback may launch another reduction, as PowerSGD does:
every rank launches that at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nc10d.base.deadline import Timeout
from nc10d.group.collectives import Collectives
from nc10d.ops import SUM
from nc10d.reducer.hooks.deferred_future import OrderedFuture
from nc10d.reducer.hooks.grad_bucket import require_work
from nc10d.torch.backend.torch_reductions import reduction
from nc10d.work import Future, Work

_REDUCTIONS = (torch.distributed.ReduceOp, torch.distributed.ReduceOp.RedOpType)


def register() -> None:
    """Give groups the methods that torch.distributed's functions call."""
    for method in (allreduce, allgather):
        setattr(Collectives, method.__name__, method)


Value = list[torch.Tensor] | list[Sequence[torch.Tensor]]


class LaunchedCall:
    """A call's Work as torch's hooks use it; `value` is the Future's."""

    def __init__(self, work: Work | None, value: Value) -> None:
        self.work = require_work(work)
        self._value = value

    def wait(self, timeout: Timeout = None) -> bool:
        """Wait for the Work; see Work.wait."""
        return self.work.wait(timeout)

    def get_future(self) -> Future[Value]:
        """Return a Future for the value, which a wait for the Future completes."""

        def end(value: Callable[[], object]) -> Value:
            value()  # raises the Work's error
            return self._value

        return OrderedFuture(self.work, end)


def allreduce(
    group: Collectives,
    tensors: Sequence[torch.Tensor] | torch.Tensor,
    opts: Any = None,
    timeout: Timeout = None,
) -> LaunchedCall:
    """Launch an in-place reduction on a single tensor, or on a list with one tensor.

    `opts` is torch's or nc10d's reduction, or torch's options with one; the default is a sum.
    """
    tensor = _single(tensors)
    op = getattr(opts, "reduceOp", SUM if opts is None else opts)
    op = reduction(op) if isinstance(op, _REDUCTIONS) else op
    return LaunchedCall(group.all_reduce(tensor, op, async_op=True, timeout=timeout), [tensor])


def allgather(
    group: Collectives,
    outputs: Sequence[Sequence[torch.Tensor]] | Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] | torch.Tensor,
    opts: Any = None,
    timeout: Timeout = None,
) -> LaunchedCall:
    """Launch gathering every rank's tensor into a list, or a list with one list.

    `opts`, torch's options, set nothing that nc10d knows.
    """
    output = _single(outputs) if isinstance(outputs[0], (list, tuple)) else outputs
    work = group.all_gather(output, _single(inputs), async_op=True, timeout=timeout)
    return LaunchedCall(work, [output])


def _single(given: Any) -> Any:
    """Return the only item in a list, or an object that is no list; ValueError for other lists."""
    found = given if isinstance(given, (list, tuple)) else [given]
    if len(found) != 1:
        raise ValueError(f"a rank has a single tensor in a call, not {len(found)}")
    return found[0]
