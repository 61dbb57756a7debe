"""Keep torch.compile away from all public calls of nc10d (see nc10d.torch.uncompiled)."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import nc10d
from nc10d.api import async_array, functional
from nc10d.torch.uncompiled import in_python


def mark_public_calls() -> None:
    """Mark all public functions of nc10d, and the methods of all public classes."""
    names = {name: getattr(nc10d, name) for name in nc10d.__all__}
    for value in (*names.values(), *vars(functional).values(), *vars(async_array).values()):
        for function in _functions_of(value):
            in_python(function)


def _functions_of(value: Any) -> Iterable[FunctionType]:
    """Yield a function of nc10d itself, or those that a class of nc10d and its bases define."""
    if isinstance(value, type):
        for base in value.__mro__:
            if base.__module__.startswith("nc10d."):
                for member in vars(base).values():
                    yield from _functions_of(getattr(member, "__func__", member))
    elif isinstance(value, FunctionType) and value.__module__.startswith("nc10d."):
        yield value
