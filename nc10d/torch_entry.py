"""The entry point that makes `torch.distributed.init_process_group("nc10d")` work without imports.

torch calls `register` at the end of its own import (entry points of the group "torch.backends").
`register` imports nothing: nc10d's modules are imported when the first group is made.
"""

from __future__ import annotations

import os
from typing import Any

from nc10d.base import torch_registration
from nc10d.base.run_to_end import import_to_end
from nc10d.torch_gloo import replace_gloo


def register() -> None:
    """Register the backend "nc10d" with torch.distributed; in gloo's place too, if so asked."""
    torch_registration.register(create)
    if os.environ.get("NC10D_AS_GLOO") == "1":
        replace_gloo()


def create(*arguments: Any) -> Any:
    """Make a group; see nc10d.torch.backend.creation.create."""
    return import_to_end("nc10d.torch.backend.creation").create(*arguments)
