"""nc10d under torch.compile: which calls become part of a graph, and which stay with Python."""

import nc10d
from nc10d.api import async_array, functional
from nc10d.torch.compiling.compile_errors import register
from nc10d.torch.compiling.rewriting import rewrite_calls
from nc10d.torch.uncompiled import all_in_python, in_python

__all__ = ["in_python", "mark_public_calls", "register", "rewrite_calls"]


def mark_public_calls() -> None:
    """Mark all public nc10d functions, and the methods of all public classes."""
    public = (getattr(nc10d, name) for name in nc10d.__all__)
    all_in_python([*public, *vars(functional).values(), *vars(async_array).values()])
