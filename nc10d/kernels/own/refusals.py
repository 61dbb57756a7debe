"""Why a function is no reduction: Numba's errors, and calls that compiled code must not make.

Every refusal is a TypeError that quotes the function's line.
"""

from __future__ import annotations

import contextlib
import dis
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numba import errors

from nc10d.ops.own_reductions import Function

LOOP = "; for arrays of a record write a loop over their elements"
RAISES = "it may raise an error"
_REFUSED = re.compile(r"(NRT_|Py|numba_gil|numba_unpickle)\w*")
_MOST_REASON = 200
_NUMBAS = errors.NumbaError, errors.UnsupportedBytecodeError, AssertionError


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise a function's own TypeError in place of Numba's error, which speaks of the loop."""
    try:
        yield
    except (TypeError, errors.NumbaError) as error:
        cause: BaseException | None = error
        while cause is not None:
            if type(cause) is TypeError:
                raise TypeError(*cause.args) from None  # without Numba's many frames
            cause = cause.__cause__ or cause.__context__
        raise


@contextlib.contextmanager
def quoting(function: Function) -> Iterator[None]:
    """Raise Numba's error as a TypeError that quotes the function's line."""
    try:
        yield
    except (*_NUMBAS, KeyError, ValueError, NotImplementedError, AttributeError) as error:
        # KeyError: a ufunc that GPUs lack; ValueError: NumPy's, for fields that are not aligned;
        # AssertionError, NotImplementedError, AttributeError: Numba's own faults.
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        reason = text.partition("pipeline (step:")[2].partition("\n")[2] or text
        reason = re.split(r"\n\s*(?:\n|File|During)", reason, maxsplit=1)[0] or f"Numba fails{LOOP}"
        file = re.escape(Path(function.__code__.co_filename).name)
        places = re.findall(rf'File "[^"]*{file}", line (\d+)', text)
        unknown = re.search(r"NameError: name '(\w+)'", reason)
        line = int(places[0]) if places else 0
        line = line_of(function, "LOAD_GLOBAL", unknown[1]) if unknown else line
        raise refusal(function, " ".join(reason.split())[:_MOST_REASON], line) from error


def fault_of(result: Any) -> tuple[str, int] | None:
    """Return the reason to refuse a compiled function, with the line if known; None if none."""
    module = result.library._final_module
    text = str(module)
    todo, seen = [module.get_function(result.fndesc.llvm_func_name)], set()
    while todo:
        function = todo.pop()
        seen.add(function.name)
        for instruction in (i for block in function.blocks for i in block.instructions):
            line = _line(str(instruction), text)
            if instruction.opcode == "ret" and not re.match(r"\s*ret i32 0\b", str(instruction)):
                return RAISES, line
            if instruction.opcode not in ("call", "invoke"):
                continue
            callee = [*instruction.operands][-1]
            if callee.name == "NRT_Allocate":  # an error's arguments; other objects are counted
                return RAISES, line
            if _REFUSED.match(callee.name):
                allocates = callee.name.startswith("NRT_")
                return "it allocates memory" if allocates else "it calls the interpreter", line
            known = callee.name and callee.name not in seen and not callee.name.startswith("llvm.")
            if known and not module.get_function(callee.name).is_declaration:
                todo.append(module.get_function(callee.name))
    return None


def line_of(function: Function, opname: str, name: str = "") -> int:
    """Return the line of the first such instruction, with this name if given; 0 if none."""
    for each in dis.get_instructions(function):
        if each.opname == opname and name in ("", each.argval) and each.positions is not None:
            return each.positions.lineno or 0
    return 0


def _line(instruction: str, module: str) -> int:
    """Return the source line of an instruction, 0 if unknown."""
    place = re.search(r"!dbg (![0-9]+)", instruction)
    found = place and re.search(rf"^{place[1]} = !DILocation\(line: (\d+)", module, re.MULTILINE)
    return int(found[1]) if found else 0


def refusal(function: Function, why: str, line: int = 0) -> TypeError:
    """Return the error for a function that is no reduction; it quotes the line."""
    code = function.__code__
    line = line or code.co_firstlineno
    quoted = linecache.getline(code.co_filename, line).strip()
    place = f"{Path(code.co_filename).name}, line {line}" + (f": {quoted}" if quoted else "")
    return TypeError(f"{function.__name__} can't be a reduction: {why}\n  {place}")
