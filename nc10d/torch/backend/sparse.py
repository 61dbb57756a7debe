"""The sum of sparse tensors over a group: ranks gather their indices and values, then each adds."""

from __future__ import annotations

import torch

from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, SUM, ReduceOp


def sparse_all_reduce(group: ProcessGroup, x: torch.Tensor, op: ReduceOp) -> None:
    """Replace sparse `x` by the sum (or average) of all ranks' tensors of its shape. Blocks.

    ValueError for other reductions, and on every rank if the shapes differ.
    """
    if op is not SUM and op is not AVG:
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
        x.copy_(total / group.size() if op is AVG else total)
