"""Steps of torch's optimizers on given tensors and gradients, for hooks that have both at hand.

    optimizer = as_functional_optim(torch.optim.AdamW, lr=1e-3)
    optimizer.step_params(params, gradients)    # no parameter's .grad is read or written

Contract: a step computes what the optimizer's own `step` would, bit by bit, since the optimizer
runs: on tensors that share the parameters' memory and have the gradients. So every optimizer that
treats each parameter alone can be used, with all options (fused and foreach, too).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim import Optimizer

from nc10d.torch.optim.global_state import State

Gradients = Sequence["torch.Tensor | None"]


def as_functional_optim(
    optim_cls: type[Optimizer], *args: object, **kwargs: object
) -> FunctionalOptimizer:
    """Return an `optim_cls` without parameters, which steps the parameters that each call gives.

    `args` and `kwargs` are the options of `optim_cls`, after the parameters. ValueError for an
    optimizer that couples parameters.
    """
    return FunctionalOptimizer(optim_cls, [], *args, **kwargs)


def require_separable(optim_cls: type[Optimizer]) -> None:
    """Raise a ValueError for an optimizer that does not treat each parameter alone."""
    if isinstance(optim_cls, type) and issubclass(optim_cls, torch.optim.LBFGS):
        raise ValueError(
            "L-BFGS couples all parameters: neither its state nor its step can be divided"
        )


class FunctionalOptimizer:
    """Steps `params` and any other tensors by an `optim_cls`; a state begins at the first step.

    `params` are tensors, or dicts of parameter groups. Other tensors join the first group. Any
    thread may call.
    """

    def __init__(
        self,
        optim_cls: type[Optimizer],
        params: Iterable[torch.Tensor | dict[str, Any]],
        *args: object,
        **kwargs: object,
    ) -> None:
        require_separable(optim_cls)
        self._make: Callable[..., Optimizer] = lambda rows: optim_cls(rows, *args, **kwargs)
        self._lock = threading.Lock()
        self._twins: dict[torch.Tensor, torch.Tensor] = {}
        self._group_of: dict[torch.Tensor, int] = {}
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        rows = []
        for index, group in enumerate(groups):
            twins = [self._twin(x, index) for x in group["params"]]
            rows.append({**group, "params": twins})
        self._params = list(self._twins)
        self._optimizer = self._make(rows)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups: options can be read and set there."""
        return self._optimizer.param_groups

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Each stepped tensor's state."""
        state = self._optimizer.state
        return {x: state[twin] for x, twin in self._twins.items() if twin in state}

    def step(self, gradients: Gradients) -> None:
        """Step the constructor's `params` by `gradients`; None leaves a parameter unchanged.

        ValueError if there is not a gradient for each.
        """
        self.step_params(self._params, gradients)

    def step_param(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Step a single parameter."""
        self.step_params([param], [grad])

    def step_params(self, params: Sequence[torch.Tensor], gradients: Gradients) -> None:
        """Step `params` by `gradients`; None leaves a parameter and its state unchanged."""
        if len(params) != len(gradients):
            raise ValueError(f"got {len(gradients)} gradients for {len(params)} parameters")
        pairs = [(x, g) for x, g in zip(params, gradients, strict=True) if g is not None]
        with self._lock:
            for x, _ in pairs:
                if x not in self._twins:
                    self._add(x)
            groups = self._optimizer.param_groups
            kept = [group["params"] for group in groups]
            try:
                stepped: list[list[torch.Tensor]] = [[] for _ in groups]
                for x, gradient in pairs:
                    stepped[self._group_of[x]].append(self._set(x, gradient))
                # So a step takes the time for its own parameters, not for all.
                for group, twins in zip(groups, stepped, strict=True):
                    group["params"] = twins
                self._optimizer.step()
            finally:
                for group, twins in zip(groups, kept, strict=True):
                    group["params"] = twins
                for x, _ in pairs:
                    self._twins[x].grad = None

    def state_dict(self) -> State:
        """Return the state in the form of torch's optimizers, for all tensors so far."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Load a copy of a state with as many tensors; ValueError for another number."""
        self._optimizer.load_state_dict(deepcopy(state_dict))

    def _twin(self, x: torch.Tensor, group: int) -> torch.Tensor:
        """Return a tensor in the memory of `x` that has its own gradients."""
        # Both share the version counter: so autograd finds a step that comes too early.
        twin = self._twins[x] = x.detach()
        self._group_of[x] = group
        return twin

    def _add(self, x: torch.Tensor) -> None:
        twin = self._twin(x, 0)
        # Some optimizers make a parameter's state in their constructor.
        self._optimizer.state.update(self._make([twin]).state)
        self._optimizer.param_groups[0]["params"].append(twin)

    def _set(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        twin = self._twins[x]
        if twin.data_ptr() != x.data_ptr():
            twin.data = x.detach()
        twin.grad = gradient.detach()
        return twin
