"""The entry point that makes `torch.distributed.init_process_group("nc10d")` work without imports.

torch calls `register` at the end of its own import (entry points of the group "torch.backends"). It
imports nothing: the modules of nc10d are imported when the first group is made.
"""

from __future__ import annotations

import sys
from typing import Any

from nc10d.base.run_to_end import import_to_end

NAME = "nc10d"
_DEVICES = ("cpu", "cuda")


def register() -> None:
    """Register the backend "nc10d" with torch.distributed; again: no change."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if NAME.upper() not in distributed.Backend._plugins:
        devices = [*_DEVICES]
        distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)


def _create(*arguments: Any) -> Any:
    """Make a group; see nc10d.torch.backend.creation.create."""
    return import_to_end("nc10d.torch.backend.creation").create(*arguments)
