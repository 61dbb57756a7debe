"""A process group: members, calls, and how a call reaches a backend.

`nc10d.group.WORLD` is the default group, or None; the name is c10d's.
"""

from __future__ import annotations

from typing import Any

from nc10d.base.run_to_end import import_to_end


def __getattr__(name: str) -> Any:
    if name in ("WORLD", "ProcessGroup"):
        module = import_to_end("nc10d.group.process_group")
        return module.ProcessGroup if name == "ProcessGroup" else module.default_group()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
