"""Keep torch.compile away from all public nc10d calls (see nc10d.torch.uncompiled)."""

from __future__ import annotations

import nc10d
from nc10d.api import async_array, functional
from nc10d.torch.uncompiled import all_in_python


def mark_public_calls() -> None:
    """Mark all public nc10d functions, and the methods of all public classes."""
    public = (getattr(nc10d, name) for name in nc10d.__all__)
    all_in_python([*public, *vars(functional).values(), *vars(async_array).values()])
