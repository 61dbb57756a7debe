"""Count the Python functions that a call enters."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def python_frames(call: Callable[[], object]) -> int:
    """Count the Python functions that a call enters, itself included.

    The garbage collector rests: it would enter finalizers of other tests' objects.
    """
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return len(entered)
