"""Average the parameters of ranks at intervals, in place of their gradients in every step.

    averager = PeriodicModelAverager(period=4, warmup_steps=100)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager)

Contract: names, arguments and steps are those of torch.distributed.algorithms.model_averaging and
of torch.distributed.optim. Every rank calls in the same steps, and blocks until all have called.
Groups are nc10d's, or torch groups on nc10d. The parameters keep their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from nc10d.group.new_group import new_subgroups
from nc10d.group.process_group import ProcessGroup
from nc10d.reducer.hooks import local_sgd
from nc10d.torch.backend.groups import AnyGroup, meant_group, own_group
from nc10d.torch.optim.global_state import State


class ModelAverager:
    """Averages parameters over a group (None: the default group) in some of its steps."""

    def __init__(self, process_group: AnyGroup | None = None) -> None:
        self.process_group = meant_group(process_group)
        self._group = own_group(process_group)
        self.step = 0

    def average_parameters(self, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]]) -> None:
        """Count a step, and average the parameters that have a gradient if the step is due.

        `params` are parameters, or an optimizer's `param_groups`.
        """
        group = self._group_of(self.step)
        if group is not None:
            average_parameters(parameters_with_gradients(params), group)
        self.step += 1

    def _group_of(self, step: int) -> ProcessGroup | None:
        """Return the group to average over in a step, or None."""
        raise NotImplementedError


class PeriodicModelAverager(ModelAverager):
    """Averages in every `period`-th step, from step `warmup_steps` on.

    ValueError for a period below 1, and for less than no warm-up steps.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: AnyGroup | None = None
    ) -> None:
        if period < 1:
            raise ValueError(f"period must be a positive number of steps, got {period}")
        super().__init__(process_group)
        self.period, self.warmup_steps = period, _checked(warmup_steps)

    def _group_of(self, step: int) -> ProcessGroup | None:
        due = step >= self.warmup_steps and not (step - self.warmup_steps) % self.period
        return self._group if due else None


class HierarchicalModelAverager(ModelAverager):
    """Averages over small groups often, and over large groups seldom.

    `period_group_size_dict` maps periods to group sizes, both growing: with {4: 8, 16: 16}, ranks
    average in runs of 8 every 4 steps, and all 16 ranks every 16 steps. Only the largest group of a
    step averages. The last size is that of `process_group`. Every rank of the default group makes
    one at the same point, since that makes groups.

    ValueError for other sizes and periods, and for less than no warm-up steps.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: AnyGroup | None = None,
    ) -> None:
        if not period_group_size_dict:
            raise ValueError("period_group_size_dict must not be empty")
        periods, sizes = list(period_group_size_dict), list(period_group_size_dict.values())
        super().__init__(process_group)
        whole = self._group
        if periods[0] < 1 or periods != sorted(periods) or sizes != sorted(sizes):
            raise ValueError(
                "period_group_size_dict must have growing periods from 1 on, and growing sizes: "
                f"got {dict(period_group_size_dict)}"
            )
        if sizes[-1] != whole.size:
            raise ValueError(
                f"the last size of period_group_size_dict is {sizes[-1]}, "
                f"the group has {whole.size} ranks"
            )
        self.warmup_steps = _checked(warmup_steps)
        self.period_process_group_dict: dict[int, Any] = {
            period: whole if size == whole.size else new_subgroups(size, whole)[0]
            for period, size in period_group_size_dict.items()
        }

    def _group_of(self, step: int) -> ProcessGroup | None:
        due = [
            group for period, group in self.period_process_group_dict.items() if not step % period
        ]
        return due[-1] if due and step >= self.warmup_steps else None


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps by `optim`, an optimizer of local gradients, and then averages by `averager`.

    Its `state_dict` contains the averager's step, so a resumed job has no second warm-up.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        self.optim = optim
        self.param_groups = optim.param_groups
        self.defaults = optim.defaults
        self.averager = averager

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The inner optimizer's state."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> State:
        """Return the optimizer's state, with the averager's step under "step"."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: State) -> None:
        """Load the optimizer's state and the averager's step; ValueError without a step."""
        if "step" not in state_dict:
            raise ValueError(
                "the state has no step of an averager: load a plain optimizer's state by "
                "`optim.load_state_dict`, and set `averager.step`"
            )
        inner = {name: x for name, x in state_dict.items() if name != "step"}
        self.optim.load_state_dict(inner)
        self.param_groups = self.optim.param_groups
        self.averager.step = state_dict["step"]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step, then average if this step is due; return the closure's loss. Blocks."""
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do as the optimizer inside."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer."""
        self.optim.add_param_group(param_group)


def average_parameters(
    params: Iterable[torch.Tensor], process_group: AnyGroup | None = None
) -> None:
    """Average parameters over a group, in place: each divides before the sum. Blocks."""
    local_sgd.average_parameters([x.detach() for x in params], own_group(process_group))


def parameters_with_gradients(
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
) -> list[torch.Tensor]:
    """Return the tensors among parameters, or in an optimizer's groups, that have a gradient."""
    rows = [x["params"] if isinstance(x, dict) else [x] for x in params]
    return [x for row in rows for x in row if x.grad is not None]


def _checked(warmup_steps: int) -> int:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")
    return warmup_steps
