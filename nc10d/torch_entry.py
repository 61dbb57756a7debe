"""The entry point that makes `torch.distributed.init_process_group("nc10d")` work without imports.

torch calls `register` at the end of its own import (entry points of the group "torch.backends").
`register` imports nothing: nc10d's modules are imported when the first group is made.
"""

from __future__ import annotations

from typing import Any

from nc10d.base import torch_registration
from nc10d.base.run_to_end import import_to_end


def register() -> None:
    """Register the backend "nc10d" with torch.distributed; see `torch_registration.register`."""
    torch_registration.register(create, create_as_gloo)


def create(*arguments: Any) -> Any:
    """Make a group; see nc10d.torch.backend.creation.create."""
    return import_to_end("nc10d.torch.backend.creation").create(*arguments)


def create_as_gloo(*arguments: Any, **options: Any) -> Any:
    """Make a group in gloo's place; see nc10d.torch.backend.creation.create_as_gloo."""
    creation = import_to_end("nc10d.torch.backend.creation")
    return creation.create_as_gloo(*arguments, **options)
