"""Keep torch.compile away from a function of nc10d: a compiled function calls it as Python does.

Contract: a marked function is the same function with the same frames, so a program that compiles
nothing pays nothing. In a compiled function a call of it is a graph break. Its code, and all code
that it calls, is neither traced nor compiled. The compiler itself is not imported: that takes a
second, and fails if two threads do it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

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
