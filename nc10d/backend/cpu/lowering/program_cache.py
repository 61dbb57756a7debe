"""The programs of a group, built and linked once for each key; see lower.py for the keys."""

from __future__ import annotations

from typing import Any

from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.lowering.lower import LoweredOp
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.program.linker import Linked, Scratch, link
from nc10d.backend.cpu.program.program import Kernel
from nc10d.kernels.reduce import both_address, divide_address, kernel_address, scale_address
from nc10d.ops import RedOp

MOST_PROGRAMS = 4096
"""A cache that has grown to its limit is emptied."""
_DTYPES = {dtype.label: dtype for dtype in DType}


class ProgramCache:
    """The programs of a group of this shape."""

    def __init__(self, shape: GroupShape) -> None:
        self._shape = shape
        self._scratch = Scratch()
        self._linked: dict[tuple[Any, ...], Linked] = {}

    def linked(self, lowered: LoweredOp) -> Linked:
        """Return the program of a lowered operation; a new program may block to compile kernels."""
        found = self._linked.get(lowered.key)
        if found is None:
            if len(self._linked) >= MOST_PROGRAMS:
                self._linked.clear()
            program = lowered.build()
            found = link(
                program, self._shape.local.size, at.C_TABLES, _kernel_address, self._scratch.room
            )
            self._linked[lowered.key] = found
        return found


def _kernel_address(kernel: Kernel) -> int:
    dtype = _DTYPES[kernel.dtype]
    if kernel.kind == "DIVIDE":
        return divide_address(dtype)
    if kernel.kind == "SCALE":
        return scale_address(dtype)
    if kernel.kind.startswith("BOTH_"):
        return both_address(RedOp[kernel.kind.removeprefix("BOTH_")], dtype)
    return kernel_address(RedOp[kernel.kind], dtype)
