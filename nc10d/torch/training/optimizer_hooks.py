"""Optimizers that step inside a comm hook: `hook_then_optimizer`, as in torch.

    state = OptimizerHookState(functional_optimizer)
    model.register_comm_hook(group, hook_then_optimizer(allreduce_hook, state))

Contract: a functional optimizer has a method `step_param(param, gradient)`, as those of
torch.distributed.optim.as_functional_optim. It steps by the mean that the inner hook returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from nc10d.reducer.hooks import GradBucket, require_work
from nc10d.reducer.hooks.grad_bucket import single_array
from nc10d.torch.tensor_bucket import TORCHS_FUTURE, from_torch
from nc10d.torch.tensors import as_tensor, like
from nc10d.torch.torch_calls import LaunchedCall
from nc10d.work import Future, Work

Hook = Callable[[Any, Any], object]


class OptimizerHookState:
    """A functional optimizer, and the parameters to step (None: all in the module).

    ValueError if the optimizer has no `step_param`.
    """

    def __init__(self, functional_optim: Any, params: Iterable[torch.Tensor] | None = None) -> None:
        if not callable(getattr(functional_optim, "step_param", None)):
            raise ValueError(
                f"{type(functional_optim).__name__} is no functional optimizer: it has no method "
                "step_param(param, gradient)"
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)

    def steps(self, x: torch.Tensor) -> bool:
        """Return whether the optimizer steps this parameter."""
        return self.params_to_optimize is None or x in self.params_to_optimize


def hook_then_optimizer(hook: Hook, optimizer_state: OptimizerHookState) -> Hook:
    """Return a hook that calls `hook`, and then steps each parameter in the bucket by its mean."""

    def hook_then_step(state: object, bucket: GradBucket) -> Future[Any]:
        def step(value: Callable[[], object]) -> object:
            whole = as_tensor(single_array(value(), bucket.buffer()))
            params = bucket.parameters()
            with torch.no_grad():
                for x, gradient in zip(params, _cut(whole, params), strict=True):
                    if optimizer_state.steps(x):
                        optimizer_state.functional_optimizer.step_param(x, gradient)
            return whole

        return bucket.following(_outcome(hook(state, bucket)), step)

    return hook_then_step


def _cut(whole: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of these parameters in a bucket's reduced tensor."""
    if whole.is_sparse:
        return [whole]
    flats = whole.split([x.numel() for x in params])
    return [like(flat, x) for flat, x in zip(flats, params, strict=True)]


def _outcome(outcome: Any) -> Work | Future[Any]:
    """Return nc10d's Work or Future for a hook's result."""
    if isinstance(outcome, LaunchedCall):
        return require_work(outcome.work)
    if isinstance(outcome, TORCHS_FUTURE):
        return from_torch(outcome)
    return outcome
