"""Count the Python functions that a call enters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def python_frames(call: Callable[[], object]) -> int:
    """Count the Python functions that a call enters, itself included."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered)
