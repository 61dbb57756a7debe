"""nc10d under torch.compile: which calls become part of a graph, and which stay with Python."""

from nc10d.torch.compiling.compile_errors import register
from nc10d.torch.compiling.marks import mark_public_calls
from nc10d.torch.compiling.rewriting import rewrite_calls
from nc10d.torch.uncompiled import in_python

__all__ = ["in_python", "mark_public_calls", "register", "rewrite_calls"]
