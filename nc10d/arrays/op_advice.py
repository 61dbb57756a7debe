"""The ReduceOp that a program means by a function, or by another library's operation. Pure."""

from __future__ import annotations

import re
from types import FunctionType
from typing import Any

from nc10d.base.run_to_end import off_main
from nc10d.ops.reductions import KINDS

_MEANT = {word: kind.name for kind in KINDS for word in kind.synonyms.split()}


def advice_for(op: Any) -> str:
    """Return an error's last words, which name the ReduceOp meant by `op`; "" if unknown.

    Such as ": use ReduceOp.MAX" for numpy.maximum, max, "max", and torch's and MPI's MAX.
    """
    words = re.findall(r"\w+", _name(getattr(op, "op", op)).lower())  # torch's ReduceOp has `op`
    named = next((_MEANT[word] for word in words if word in _MEANT), None)
    if named is not None:
        return f": use ReduceOp.{named}"
    if not isinstance(getattr(op, "__wrapped__", op), FunctionType):
        return ""
    if str(op.__module__).startswith("nc10d.ops."):
        return f": call it, nc10d.{op.__name__}(...)"
    return ": make it a reduction, by @nc10d.reduction(dtype)"


@off_main
def _name(op: object) -> str:
    """Return the name under which `op` would be pickled; the repr if that is no name."""
    try:
        found = op.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  (of the caller's code)
        found = None
    return found if isinstance(found, str) else repr(op)
