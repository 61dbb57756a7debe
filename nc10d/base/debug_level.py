"""The debug level of this process: how much nc10d checks and reports, as in c10d."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable

VARIABLES = ("NC10D_DEBUG", "TORCH_DISTRIBUTED_DEBUG")
"""The environment variables of the level: the first that is set and not empty counts."""


class DebugLevel(enum.IntEnum):
    """How much is checked and reported; names and numbers are c10d's."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_level: DebugLevel | None = None
listeners: list[Callable[[], object]] = []
"""Functions that are called after the level was set."""


def get_debug_level() -> DebugLevel:
    """Return the level that was set last; the first call reads the environment.

    With DETAIL, checksums detect a write to an array of an unfinished asynchronous call; its wait
    raises ValueError. During the call NumPy arrays are read-only too, where NumPy can make them
    writable again; tensors are not. (A view that is made meanwhile stays read-only.) For arrays on
    a device, launches and waits block the host. DETAIL copies every array. The level may differ
    between ranks. Ranks that disagree on a call raise an error at any level.
    """
    if _level is None:
        set_debug_level_from_env()
    assert _level is not None
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the level; TypeError unless it is a DebugLevel."""
    global _level
    if not isinstance(level, DebugLevel):
        raise TypeError(f"set_debug_level: expected a DebugLevel, got {level!r}")
    _level = level
    for listener in listeners:
        listener()


def set_debug_level_from_env() -> None:
    """Set the level from NC10D_DEBUG, else from TORCH_DISTRIBUTED_DEBUG, else to OFF.

    ValueError, and no change, unless the value is OFF, INFO or DETAIL (upper or lower case).
    """
    name = next((name for name in VARIABLES if os.environ.get(name)), None)
    set_debug_level(DebugLevel.OFF if name is None else _parse_level(name, os.environ[name]))


def _parse_level(name: str, text: str) -> DebugLevel:
    try:
        return DebugLevel[text.upper()]
    except KeyError:
        levels = ", ".join(level.name for level in DebugLevel)
        raise ValueError(f"{name} must be one of {levels}, got {text!r}") from None
