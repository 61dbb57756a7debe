"""The conformance suite's cases, through a torch group's calls: dtypes, layouts, sizes, reductions.

Any two of call, dtype, reduction and layout meet in a case. The oracle is the suite's own.
"""

import numpy as np
import torch
from torch._C import _distributed_c10d as c10d

from nc10d import ops as O
from nc10d.group.world import World
from nc10d.testing import Ranks, layouts, reference, strategies
from nc10d.testing.cases import cover
from nc10d.torch.backend.python_backend import PythonBackend
from nc10d.torch.backend.python_group import PythonGroup
from nc10d.torch.backend.torch_versions import PYTHON_BACKENDS
from nc10d.torch.tensors import DTYPES, as_numpy, as_tensor

SIZE = 3
WITHOUT_CALL = {"gather_single", "scatter_single", "scan", "exscan"}
"""Calls that no torch group has, or none before 2.14."""
CASES = [
    case
    for case in cover((SIZE,), [*DTYPES.values()])
    if case.call not in WITHOUT_CALL and case.shape != "reversed"  # torch has no such tensors
]


def tensors(arrays):
    """Return tensors in the memory of an array or of a list of arrays."""
    return [as_tensor(x) for x in arrays] if isinstance(arrays, list) else as_tensor(arrays)


def options(kind, op, async_op):
    made = kind()
    made.asyncOp = async_op
    if hasattr(op, "op"):
        number = c10d.ReduceOp.RedOpType(op.op.kind.number)
        factor = op.op.factor
        plain = factor is None
        made.reduceOp = c10d.ReduceOp(number) if plain else c10d._make_nccl_premul_sum(factor)
    if hasattr(op, "root"):
        made.rootRank = op.root
    return made


def call(group, op, now):
    """Make a torch group's call for an operation; return its Work, or None."""
    if isinstance(op, O.AllReduce):
        return group.allreduce([tensors(op.x)], options(c10d.AllreduceOptions, op, now))
    if isinstance(op, O.Reduce):
        return group.reduce([tensors(op.x)], options(c10d.ReduceOptions, op, now))
    if isinstance(op, O.Broadcast):
        return group.broadcast([tensors(op.x)], options(c10d.BroadcastOptions, op, now))
    out, inp = (None if x is None else tensors(x) for x in (op.out, op.inp))
    if isinstance(op, O.AllGather):
        how = options(c10d.AllgatherOptions, op, now)
        listed = isinstance(out, list)
        return (
            group.allgather([out], [inp], how) if listed else group.all_gather_single(out, inp, how)
        )
    if isinstance(op, O.ReduceScatter):
        how = options(c10d.ReduceScatterOptions, op, now)
        if isinstance(inp, list):
            return group.reduce_scatter([out], [inp], how)
        return group.reduce_scatter_single(out, inp, how)
    if isinstance(op, O.AllToAll):
        how = options(c10d.AllToAllOptions, op, now)
        if isinstance(out, list):
            return group.alltoall(out, inp, how)
        splits = [*(op.out_splits or ())], [*(op.in_splits or ())]
        return group.all_to_all_single(out, inp, *splits, how)
    if isinstance(op, O.Gather):
        how = options(c10d.GatherOptions, op, now)
        return group.gather([out] if out else [], [inp], how)
    how = options(c10d.ScatterOptions, op, now)
    return group.scatter([out], [inp] if inp else [], how)


def complaints(group):
    """Return the cases whose results differ from the oracle's on this rank."""
    above = (PythonBackend if PYTHON_BACKENDS else PythonGroup)(group, World())
    found = []
    for case in CASES:
        built = case.build()
        op = built.make(group.rank())
        outputs = strategies.outputs(op)
        in_block = "coalesced" in case.mode
        if in_block:
            above._start_coalescing(torch.device("cpu"))
        work = call(above, op, in_block or "async" in case.mode)
        if in_block:
            work = above._end_coalescing(torch.device("cpu"))
        if work is not None:
            work.wait()
        if isinstance(op, O.Gather) and group.rank() != built.root:
            continue
        expected = built.expected()[group.rank()]
        seen = [as_numpy(tensors(x)) for x in outputs]
        same = all(map(reference.same_bits, seen, expected))
        if not (same and all(map(layouts.intact, outputs))):
            found.append(f"{case}: {np.asarray(seen, object)} is not {expected}"[:300])
    return found


def test_every_case_has_the_results_of_the_oracle():
    assert len(CASES) > 150
    with Ranks(SIZE) as ranks:
        assert ranks.run(complaints) == [[]] * SIZE
