"""torch's reductions: its ReduceOp as nc10d's, and the sum of sparse tensors over a group.

Ranks gather the indices and values of sparse tensors, then each rank adds them.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, SUM, ReduceOp, premul_sum
from nc10d.ops.reductions import REDUCE_OPS


def ordered_by_default() -> bool:
    """Return whether NC10D_ORDERED asks for reductions in rank order."""
    return os.environ.get("NC10D_ORDERED") == "1"


_ORDERED = ordered_by_default()
BY_NUMBER: tuple[ReduceOp | None, ...] = (
    *(op.ordered if _ORDERED else op for op in REDUCE_OPS),
    None,
)
"""nc10d's reductions by the hash of torch's ReduceOp and RedOpType, which is their number.

Both libraries' numbers are equal. PREMUL_SUM, which has a factor, is None.
"""


def reduction(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> ReduceOp:
    """Return nc10d's reduction for torch's; TypeError for a factor that is no number."""
    known = BY_NUMBER[hash(op)]
    if known is not None:
        return known
    factor = op.__getstate__()[1]
    if getattr(factor, "numel", lambda: 1)() != 1:
        raise TypeError("the factor of PREMUL_SUM must be a number or a tensor of one element")
    found = premul_sum(float(factor))
    return found.ordered if _ORDERED else found


def sparse_all_reduce(group: ProcessGroup, x: torch.Tensor, op: ReduceOp) -> None:
    """Replace sparse `x` by the sum (or average) over all ranks' tensors with that shape. Blocks.

    ValueError for other reductions, and on every rank if the shapes differ.
    """
    if op.kind is not SUM.kind and op.kind is not AVG.kind:
        raise ValueError(f"sparse tensors can be summed or averaged, not reduced by {op.name}")
    own = x.detach().coalesce()
    form = torch.tensor([own.sparse_dim(), *own.shape, own._nnz()])
    forms = form.new_empty(group.size(), len(form))
    group.all_gather_into_tensor(forms, form)
    if not bool((forms[:, :-1] == form[:-1]).all()):
        shapes = [tuple(row[1:-1]) for row in forms.tolist()]
        raise ValueError(f"the ranks reduce sparse tensors of different shapes: {shapes}")
    counts = forms[:, -1].tolist()
    indices = [form.new_empty(own.sparse_dim(), count) for count in counts]
    values = [own.values().new_empty(count, *own.values().shape[1:]) for count in counts]
    with group.coalescing_manager():
        group.all_gather(indices, own.indices().contiguous().cpu())
        if x.is_cpu:
            group.all_gather(values, own.values().contiguous())
    if not x.is_cpu:
        group.all_gather(values, own.values().contiguous())
    total = torch.sparse_coo_tensor(
        torch.cat(indices, 1).to(x.device), torch.cat(values), own.shape, check_invariants=True
    ).coalesce()
    with torch.no_grad():
        x.copy_(total / group.size() if op.kind is AVG.kind else total)
