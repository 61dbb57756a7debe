"""Optimizers that step in the backward pass, each as soon as its parameter's gradient is there.

    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(model)
    loss(model(x)).backward()       # the parameters are trained when this returns

Contract: marks on parameters and hooks are torch.distributed.optim's, so that torch's functions
work, too. DistributedDataParallel takes the hooks' place: they would step by the gradient on a
single rank. A gradient is None after its step, and needs memory no longer.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

MARK = "_in_backward_optimizers"
"""A parameter's attribute with the list of its optimizers."""

KEEP_GRADIENTS = "NC10D_KEEP_STEPPED_GRADIENTS"
"""The environment variable that keeps gradients after their step, if set to 1."""


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[torch.nn.Parameter],
    optimizer_kwargs: Mapping[str, object],
    register_hook: bool = True,
) -> None:
    """Give each of `params` a separate optimizer, which steps in the backward pass.

    `optimizer_class([param], **optimizer_kwargs)` makes one. Several calls give a parameter several
    optimizers. Call it before DistributedDataParallel wraps the module; for fully_shard, afterwards
    on the shards. Without `register_hook` only the marks are made, and nothing steps unless
    DistributedDataParallel or fully_shard finds them.
    """
    for x in params:
        for mark, value in (
            (MARK, optimizer_class([x], **optimizer_kwargs)),
            ("_optimizer_classes", optimizer_class),
            ("_optimizer_kwargs", optimizer_kwargs),
        ):
            setattr(x, mark, [*getattr(x, mark, ()), value])
        if register_hook and x not in _handles:
            _handles[x] = x.register_post_accumulate_grad_hook(step)


_handles = WeakTensorKeyDictionary()
"""The hook's handle for each parameter."""


def optimizers(x: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step in a parameter's backward pass."""
    return getattr(x, MARK, [])


def take_over(params: Iterable[torch.Tensor]) -> None:
    """Remove the hooks by which these parameters' optimizers step."""
    # torch's own function keeps the handles in a module that may not have been imported.
    torchs = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    for x in params:
        handles = [_handles.pop(x)] if x in _handles else []
        if torchs is not None:
            handles += torchs.param_to_optim_hook_handle_map.pop(x, [])
        for handle in handles:
            handle.remove()


def step(x: torch.Tensor) -> None:
    """Let a parameter's optimizers step by the gradient, and drop the gradient."""
    for optimizer in optimizers(x):
        optimizer.step()
    if os.environ.get(KEEP_GRADIENTS) != "1":
        x.grad = None


def return_free_memory() -> None:
    """Return the free pages in the C library's heap to the system, if possible.

    Optimizers make their state in the first pass, between gradients and other tensors that die.
    glibc puts no tensor into a hole left by another tensor with the same size, since torch asks for
    aligned memory; the holes would keep their pages for ever: for Adam about a third of its state.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
