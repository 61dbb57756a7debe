"""Where CPython 3.11 keeps the frames of a thread, for whoever reads them without asking it.

`first_instruction` looks at frames that Python shows too, and says whether they lie as is written
here. Where they do not, nothing reads them, and calls have no sites.
"""

from __future__ import annotations

import ctypes
import sys
from types import FrameType

from nc10d.backend.cpu.native.objects import words_at

FRAME = 56
"""In a thread's state: the address of a block whose second word is its innermost frame."""
FRAME_CODE = 32
FRAME_OUTER = 48
FRAME_INSTRUCTION = 56
"""In a frame: its code object, the frame that called it, the instruction that it is at."""
_INSIDE = 24  # of a frame object: the address of the frame itself


def first_instruction() -> int | None:
    """Return how far behind a code object's start its instructions begin; None if that is lost."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11):
        return None
    here = sys._getframe()
    outer = here.f_back
    if outer is None:
        return None
    state: int = _thread_state()
    inner, frame = _inside(here), _inside(outer)
    instruction = _word(frame + FRAME_INSTRUCTION)
    # Whoever reads the thread's state is a frame itself, called by _word, called from here.
    innermost = _word(_word(state + FRAME) + 8)
    good = (
        _word(_word(innermost + FRAME_OUTER) + FRAME_OUTER) == inner
        and _word(inner + FRAME_CODE) == id(here.f_code)
        and _word(inner + FRAME_OUTER) == frame
        and _word(frame + FRAME_CODE) == id(outer.f_code)
    )
    found = instruction - id(outer.f_code) - outer.f_lasti if good else None
    del here, outer  # a frame that knows itself keeps what all its callers have
    return found


def _inside(frame: FrameType) -> int:
    return _word(id(frame) + _INSIDE)


def _word(address: int) -> int:
    return words_at(address, 1)[0]


_thread_state = ctypes.pythonapi.PyGILState_GetThisThreadState
_thread_state.restype = ctypes.c_int64
