"""How an uncaught error of torch's compiler is printed: with the program's lines only.

torch raises such an error through up to 200 frames of its own. They are left out if nc10d has
raised the error, and if the compiler refuses a call on nc10d or torch.distributed. An error of the
second kind gets advice in place of torch's hints. The compiler's other errors stay as torch has
them. So do all errors that a program catches.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from traceback import FrameSummary, TracebackException

import torch

from nc10d.base import uncaught
from nc10d.base.call_site import is_own, is_users

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_COMPILER = f"{_TORCH}_dynamo{os.sep}"
_CALLERS = tuple(f"{_TORCH}{name}{os.sep}" for name in ("distributed", f"nn{os.sep}parallel"))
_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')
_OF_GROUPS = re.compile(r"\b(nc10d|distributed|_distributed_c10d|P2POp)\b")
_ADVICE = """\
  nc10d: a graph of torch.compile cannot have this call. Make it outside of the compiled function,
  or, without fullgraph=True, in a function under torch.compiler.disable. docs/compile.md has the
  calls that a graph can have. NC10D_DEBUG=DETAIL prints the whole error."""


def register() -> None:
    """Add `_mend` to the menders of nc10d.base.uncaught."""
    uncaught.menders.append(_mend)


def _mend(error: BaseException, printed: TracebackException) -> None:
    frames = printed.stack
    if not any(frame.filename.startswith(_COMPILER) for frame in frames):
        return
    text, _, code = str(error).partition("\nfrom user code:")
    refused = type(error).__module__ == "torch._dynamo.exc"
    traced = [
        FrameSummary(name, int(line), function) for name, line, function in _FRAME.findall(code)
    ]
    raised = uncaught.is_raised_by_nc10d(frames, error)
    if not raised and not (refused and _is_of_groups(text, traced)):
        return
    frames[:] = [frame for frame in [*frames, *traced] if is_users(frame.filename)]
    if refused:
        lines = text.partition("\n\n")[0].splitlines()
        lines = [line for line in lines if not line.startswith("  Hint:")]
        # TracebackException has no public name for the text.
        vars(printed)["_str"] = "\n".join(lines if raised else [*lines, _ADVICE])


def _is_of_groups(text: str, traced: list[FrameSummary]) -> bool:
    names = [frame.filename for frame in traced]
    return bool(_OF_GROUPS.search(text)) or any(
        name.startswith(_CALLERS) or is_own(name) for name in names
    )
