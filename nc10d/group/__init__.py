"""A process group: its members, its calls, and how a call reaches a backend.

`nc10d.group.WORLD` is the default group, or None; the name is c10d's.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("WORLD", "ProcessGroup"):
        from nc10d.group.process_group import ProcessGroup, default_group

        return ProcessGroup if name == "ProcessGroup" else default_group()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
