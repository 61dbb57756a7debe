"""Keep torch.compile away from the code of nc10d: a compiled function calls it as Python does.

Contract: a marked function is the same function with the same frames, so a program that compiles
nothing pays nothing. In a compiled function a call of it is a graph break. Its code, and all code
that it calls, is neither traced nor compiled. The compiler itself is not imported: that takes a
second, and fails if two threads do it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

import nc10d
from nc10d.api import async_array, functional

F = TypeVar("F", bound=Callable[..., Any])
_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_REASON = "nc10d's calls are not compiled: a graph can have those of nc10d.torch.functional"


def in_python(function: F) -> F:
    """Mark a function, which torch.compile then leaves to Python with all that it calls."""
    assert isinstance(function, FunctionType)
    # These are the marks of torch.compiler.disable, which would also wrap the function.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    # The code of a decorator of another library is not only ours: contextlib's, for example.
    if function.__globals__["__name__"].startswith("nc10d."):
        eval_frame.set_code_exec_strategy(function.__code__, _SKIPPED)
    return function


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
