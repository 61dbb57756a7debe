"""The entry point that makes `torch.distributed.init_process_group("nc10d")` work without imports.

torch calls `register` at the end of its own import (entry points of the group "torch.backends"). It
imports nothing: the modules of nc10d are imported when the first group is made.
"""

from __future__ import annotations

import sys
from typing import Any

from nc10d.base.run_to_end import import_to_end

NAME = "nc10d"


def register() -> None:
    """Register the backend "nc10d" with torch.distributed; again: no change.

    It serves the CPU, and CUDA where torch finds a GPU.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if NAME.upper() not in distributed.Backend._plugins:
        # torch allocates tensors on a device other than the CPU if a backend claims to serve one.
        found = sys.modules["torch"].cuda.device_count()
        devices = ["cpu", "cuda"] if found else ["cpu"]
        distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)


def _create(*arguments: Any) -> Any:
    """Make a group; see nc10d.torch.backend.creation.create."""
    return import_to_end("nc10d.torch.backend.creation").create(*arguments)
