"""What torch.compile leaves to Python.

Contract: the compiler is not loaded by who does not use it: that takes a second, and threads that
load it at the same time fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_left_alone = cache(torch.compiler.disable)


def in_python(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` as one that is called, not compiled, and so is all that it calls."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        found: T = _left_alone(function)(*args, **kwargs)
        return found

    return call
