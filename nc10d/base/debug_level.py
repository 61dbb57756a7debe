"""How closely nc10d watches itself: c10d's debug level, one for the process."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable

VARIABLES = ("NC10D_DEBUG", "TORCH_DISTRIBUTED_DEBUG")
"""Where the level is read from: the first that is set and not empty."""


class DebugLevel(enum.IntEnum):
    """How much is checked and told; names and numbers are c10d's."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: DebugLevel | None = None
listeners: list[Callable[[], object]] = []
"""Called when the level has been set."""


def get_debug_level() -> DebugLevel:
    """Return the level: as it was set last, or by the environment at the first question.

    With DETAIL, a write to an array of an asynchronous call that has not ended is a ValueError out
    of the wait, found by checksums. NumPy arrays are read-only meanwhile besides, where NumPy can
    make them writable again; tensors are not. (A view that is made meanwhile is read-only for
    good.) It copies every array, and may differ between ranks. Ranks that disagree on a call are
    told so at any level.
    """
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the level; TypeError for anything but a DebugLevel."""
    global _level
    if not isinstance(level, DebugLevel):
        raise TypeError(f"set_debug_level: expected a DebugLevel, got {level!r}")
    _level = level
    for changed in listeners:
        changed()


def set_debug_level_from_env() -> None:
    """Set the level to what NC10D_DEBUG, else TORCH_DISTRIBUTED_DEBUG says, else to OFF.

    ValueError, and nothing is set, if that is none of OFF, INFO and DETAIL (in any case).
    """
    name = next((name for name in VARIABLES if os.environ.get(name)), None)
    set_debug_level(DebugLevel.OFF if name is None else _read(name, os.environ[name]))


def _read(name: str, text: str) -> DebugLevel:
    try:
        return DebugLevel[text.upper()]
    except KeyError:
        levels = ", ".join(level.name for level in DebugLevel)
        raise ValueError(f"{name} must be one of {levels}, got {text!r}") from None
