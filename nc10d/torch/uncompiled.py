"""Keep torch.compile away from an nc10d function: a compiled function calls it as Python does.

Contract: a marked function is the same function with the same frames, so a program that compiles
nothing pays nothing. In a compiled function a call of it is a graph break. The marked function's
code, and all code called from there, is neither traced nor compiled. The compiler itself is not
imported: that takes a second, and fails if two threads do it at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., object])
_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_REASON = "nc10d's calls are not compiled: a graph can have those of nc10d.torch.functional"


def in_python(function: F) -> F:
    """Mark a function, which torch.compile then leaves to Python with all calls inside."""
    assert isinstance(function, FunctionType)
    # These are the marks of torch.compiler.disable, which would also wrap the function.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    # Another library's decorator code is not only ours: contextlib's, for example.
    if function.__globals__["__name__"].startswith("nc10d."):
        _skip(function.__code__)
    return function


def all_in_python(values: Iterable[object]) -> None:
    """Mark nc10d's functions among `values`, and the methods of nc10d's classes among them."""
    for value in values:
        for function in _functions_of(value):
            in_python(function)


def modules_in_python(*names: str) -> None:
    """Mark the definitions in each loaded module whose name begins with one of `names`."""
    for name in [*sys.modules]:
        if name.startswith(names):
            found = vars(sys.modules[name]).values()
            all_in_python(x for x in found if getattr(x, "__module__", None) == name)


def _skip(code: CodeType) -> None:
    """Have the compiler pass over a code's frames, and over the functions that it makes."""
    eval_frame.set_code_exec_strategy(code, _SKIPPED)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _skip(inner)


def _functions_of(value: object) -> Iterable[FunctionType]:
    # A property is passed over as a frame alone: a graph may read a group's properties.
    if isinstance(value, type):
        for base in value.__mro__:
            if base.__module__.startswith("nc10d."):
                for member in vars(base).values():
                    if isinstance(member, property) and isinstance(member.fget, FunctionType):
                        _skip(member.fget.__code__)
                    yield from _functions_of(getattr(member, "__func__", member))
    elif isinstance(value, FunctionType) and value.__module__.startswith("nc10d."):
        yield value
