"""Exclude functions from torch.compile.

Contract: this module does not load the compiler. Loading it takes a second, and fails if two
threads load it at the same time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_uncompiled = cache(torch.compiler.disable)


def in_python(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls `function` without compiling it or its callees."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        result: T = _uncompiled(function)(*args, **kwargs)
        return result

    return call
