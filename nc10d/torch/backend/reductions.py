"""torch's ReduceOp as nc10d's."""

from __future__ import annotations

from typing import Any

from nc10d.ops import RedOp, ReduceOp, premul_sum

BY_NUMBER: tuple[ReduceOp | None, ...] = tuple(
    None if kind is RedOp.PREMUL_SUM else ReduceOp(kind) for kind in RedOp
)
"""nc10d's reductions by the hash of torch's ReduceOp and RedOpType, which is their number.

The numbers of both libraries are equal. PREMUL_SUM, which has a factor, is None.
"""


def reduction(op: Any) -> ReduceOp:
    """Return nc10d's reduction for torch's; TypeError for a factor that is no number."""
    known = BY_NUMBER[hash(op)]
    if known is not None:
        return known
    factor = op.__getstate__()[1]
    if getattr(factor, "numel", lambda: 1)() != 1:
        raise TypeError("the factor of PREMUL_SUM must be a number or a tensor of one element")
    return premul_sum(float(factor))
