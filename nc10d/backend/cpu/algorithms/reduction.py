"""How a rank publishes its contribution to a reduction, and how contributions are combined.

PREMUL_SUM scales each contribution when it is published. AVG divides the sum at the end. All other
operations publish a copy and combine pairwise, in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass

from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.backend.cpu.program.program import At, Combine, Kernel, Step
from nc10d.backend.cpu.program.steps import apply, copy
from nc10d.ops import RedOp, ReduceOp

_FLOATS = {d.label for d in DType if d.family in (ElementKind.FLOAT, ElementKind.COMPLEX)}


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduce operation on one dtype (by name), for a group of `size`."""

    op: ReduceOp
    dtype: str
    size: int

    @property
    def scaled(self) -> bool:
        """Whether a published contribution differs from the user's array."""
        return self.op.kind is RedOp.PREMUL_SUM

    @property
    def how(self) -> Combine:
        """The pairwise kernel, and the division of an average after the last pair."""
        kind = self.op.kind
        pairs = self.size == 2 and kind in (RedOp.SUM, RedOp.AVG) and self.dtype in _FLOATS
        both = Kernel(f"BOTH_{kind.name}", self.dtype) if pairs else None
        if kind in (RedOp.AVG, RedOp.PREMUL_SUM):
            pair = Kernel("SUM", self.dtype)
            last = Kernel("DIVIDE", self.dtype) if kind is RedOp.AVG else None
            return Combine(pair, last, self.size, both)
        return Combine(Kernel(kind.name, self.dtype), both=both)

    def show(self, dst: At, src: At, nbytes: int, total: int = 0) -> Step:
        """Return the step that publishes a contribution at `dst`."""
        if not self.scaled:
            return copy(dst, src, nbytes, total)
        assert self.op.factor is not None
        return apply(dst, src, nbytes, Kernel("SCALE", self.dtype), float(self.op.factor), total)
