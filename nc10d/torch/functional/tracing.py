"""Whether a call is being traced, transformed or differentiated: then it must be an operator."""

from __future__ import annotations

from typing import Any

import torch

from nc10d.torch.functional.async_tensor import AsyncCollectiveTensor
from nc10d.torch.functional.derivatives import transformed

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def needs_operator(*tensors: object) -> bool:
    """Return whether a graph, a mode, a transform or autograd must see a call with `tensors`."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return True
    if torch._C._functorch.maybe_current_level() is not None or transformed():
        return True
    if any(isinstance(x, torch.Tensor) and type(x) not in _PLAIN for x in tensors):
        return True
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def plain(x: Any) -> Any:
    """Return a tensor for an AsyncCollectiveTensor; anything else unchanged, but no tuple."""
    if isinstance(x, tuple):
        raise TypeError("expected a tensor: all_reduce and reduce_scatter_tensor take fields")
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x
