"""Calls of torch.distributed and of its groups have the results of nc10d's oracle.

The conformance suite's cases are made by a group's methods: any two of call, dtype, reduction,
layout and mode meet. Drawn programs are made by torch.distributed's functions, with messages
between the calls.
"""

import os

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C import _distributed_c10d as c10d

import nc10d.torch
from nc10d import ops as O
from nc10d.arrays.dtypes import ElementKind, dtype_of
from nc10d.group.world import World
from nc10d.ops.facts import FACTS
from nc10d.testing import layouts, reference, strategies
from nc10d.testing.cases import cover
from nc10d.torch.backend.python_backend import PythonBackend
from nc10d.torch.backend.python_group import PythonGroup
from nc10d.torch.backend.torch_versions import PYTHON_BACKENDS
from nc10d.torch.tensors import DTYPES, as_numpy, as_tensor

SIZE = 3
RANKS = {"world_size": SIZE, "kind": "processes", "timeout": 60}
PROGRAMS = int(os.environ.get("TORCH_PROGRAMS", "60"))  # 2000 in docs/torch.md
WITHOUT_CALL = {"gather_single", "scatter_single"}
WITHOUT_CALL |= {facts.name for facts in FACTS.values() if facts.optional}
"""Calls that no torch group has, or none before 2.14."""
CASES = [
    case
    for case in cover((SIZE,), [*DTYPES.values()])
    if case.call not in WITHOUT_CALL and case.shape != "reversed"  # torch has no such tensors
]
GROUPS = {}
# Their new names, where torch warns of the old ones.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def start(group):
    nc10d.torch.as_torch_group()
    GROUPS.update({size: dist.new_group([*range(size)]) for size in range(1, SIZE + 1)})


def of(x):
    """Return tensors in the memory of an array or of a list of arrays; None stays None."""
    if x is None:
        return None
    return [as_tensor(each) for each in x] if isinstance(x, list) else as_tensor(x)


def reduction(op):
    if op.factor is not None:
        return dist._make_nccl_premul_sum(op.factor)
    return dist.ReduceOp(dist.ReduceOp.RedOpType(op.kind.number))


def either(x, listed, flat):
    return listed if isinstance(x, list) else flat


def options(kind, o, async_op):
    made = kind()
    made.asyncOp = async_op
    if hasattr(o, "op"):
        made.reduceOp = reduction(o.op)
    if hasattr(o, "root"):
        made.rootRank = o.root
    return made


def listed(x):
    """Return the argument of a method that takes lists: one list for this rank, or none."""
    return [] if x is None else [of(x)]


METHODS = {
    O.AllReduce: (c10d.AllreduceOptions, lambda g, o, how: g.allreduce([of(o.x)], how)),
    O.Reduce: (c10d.ReduceOptions, lambda g, o, how: g.reduce([of(o.x)], how)),
    O.Broadcast: (c10d.BroadcastOptions, lambda g, o, how: g.broadcast([of(o.x)], how)),
    O.AllGather: (
        c10d.AllgatherOptions,
        lambda g, o, how: (
            g.allgather([of(o.out)], [of(o.inp)], how)
            if isinstance(o.out, list)
            else g.all_gather_single(of(o.out), of(o.inp), how)
        ),
    ),
    O.ReduceScatter: (
        c10d.ReduceScatterOptions,
        lambda g, o, how: (
            g.reduce_scatter([of(o.out)], [of(o.inp)], how)
            if isinstance(o.inp, list)
            else g.reduce_scatter_single(of(o.out), of(o.inp), how)
        ),
    ),
    O.AllToAll: (
        c10d.AllToAllOptions,
        lambda g, o, how: (
            g.alltoall(of(o.out), of(o.inp), how)
            if isinstance(o.out, list)
            else g.all_to_all_single(
                of(o.out), of(o.inp), [*(o.out_splits or ())], [*(o.in_splits or ())], how
            )
        ),
    ),
    O.Gather: (c10d.GatherOptions, lambda g, o, how: g.gather(listed(o.out), [of(o.inp)], how)),
    O.Scatter: (c10d.ScatterOptions, lambda g, o, how: g.scatter([of(o.out)], listed(o.inp), how)),
}
"""The options and the method of a group, by operation."""
FUNCTIONS = {
    O.AllReduce: lambda o, **how: dist.all_reduce(of(o.x), reduction(o.op), **how),
    O.Reduce: lambda o, **how: dist.reduce(of(o.x), group_dst=o.root, op=reduction(o.op), **how),
    O.Broadcast: lambda o, **how: dist.broadcast(of(o.x), group_src=o.root, **how),
    O.AllGather: lambda o, **how: either(o.out, dist.all_gather, ALL_GATHER)(
        of(o.out), of(o.inp), **how
    ),
    O.ReduceScatter: lambda o, **how: either(o.inp, dist.reduce_scatter, REDUCE_SCATTER)(
        of(o.out), of(o.inp), reduction(o.op), **how
    ),
    O.AllToAll: lambda o, **how: (
        dist.all_to_all(of(o.out), of(o.inp), **how)
        if isinstance(o.out, list)
        else dist.all_to_all_single(of(o.out), of(o.inp), o.out_splits, o.in_splits, **how)
    ),
    O.Gather: lambda o, **how: dist.gather(of(o.inp), of(o.out), group_dst=o.root, **how),
    O.Scatter: lambda o, **how: dist.scatter(of(o.out), of(o.inp), group_src=o.root, **how),
    O.Barrier: lambda o, **how: dist.barrier(**how),
}
"""The function of torch.distributed, by operation."""
TOGETHER = (O.AllReduce, O.AllGather, O.ReduceScatter)
"""What torch's coalescing manager collects itself, if it is flat."""


def wrong(call, rank, op):
    """Return the difference of a call's results from the oracle's, as a list of at most one."""
    if isinstance(op, O.Gather) and rank != call.root:
        return []
    outputs, expected = strategies.outputs(op), call.expected()[rank]
    seen = [as_numpy(as_tensor(x)) for x in outputs]
    if all(map(reference.same_bits, seen, expected)) and all(map(layouts.intact, outputs)):
        return []
    what = f"{call.kind.__name__} {call.op} {call.layout}, flat={call.flat}"
    return [f"{what}: {np.asarray(seen, object)} is not {expected}"[:400]]


def by_methods(group):
    """Return the cases whose results are wrong on this rank."""
    above = (PythonBackend if PYTHON_BACKENDS else PythonGroup)(group, World())
    found = []
    for case in CASES:
        call = case.build()
        op, in_block = call.make(group.rank()), "coalesced" in case.mode
        if in_block:
            above._start_coalescing(torch.device("cpu"))
        kind, method = METHODS[call.kind]
        work = method(above, op, options(kind, op, in_block or "async" in case.mode))
        if in_block:
            work = above._end_coalescing(torch.device("cpu"))
        if work is not None:
            work.wait()
        found += [f"{case}: {text}" for text in wrong(call, group.rank(), op)]
    return found


def test_every_case_has_the_results_of_the_oracle(ranks):
    assert len(CASES) > 150
    assert ranks.run(by_methods) == [[]] * SIZE


def torch_has(call):
    """Return whether torch.distributed has the call, and passes its reduction on."""
    lacks = FACTS[call.kind].optional
    if lacks or (call.kind in (O.Gather, O.Scatter) and call.flat):
        return False
    x = call.inputs[0]
    x = x[0] if isinstance(x, list) else x
    complex_ = x is not None and dtype_of(x.dtype).family is ElementKind.COMPLEX
    return not complex_ or call.op in (O.SUM, O.AVG)


def perform(group, call, mode):
    """Make a call in a mode, on fresh memory each time; return the operations."""
    if mode != "coalesced" or call.kind is O.Barrier:
        op = call.make(group.rank())
        work = FUNCTIONS[call.kind](op, group=group, async_op=mode == "async")
        assert (work is None) == (mode != "async")
        if work is not None:
            work.wait()
        return [op]
    ops = [call.make(group.rank()) for _ in range(3)]
    plain = call.kind in TOGETHER and (call.flat or call.kind is O.AllReduce)
    device = None if plain else torch.device("cpu")
    with dist._coalescing_manager(group, device, async_ops=True) as block:
        for op in ops:
            FUNCTIONS[call.kind](op, group=group, async_op=not plain)
    block.wait()
    return ops


def pass_round(group, array, layout, form):
    """Send an array to the next rank, and receive the one of the rank before; return it."""
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    x, y = (as_tensor(layouts.lay(each, layout)) for each in (array, np.zeros_like(array)))
    if form == "batch":
        sends = dist.P2POp(dist.isend, x, group=group, group_peer=after)
        takes = dist.P2POp(dist.irecv, y, group=group, group_peer=before)
        works = dist.batch_isend_irecv([takes, sends])
    elif form == "any source":
        works = [dist.isend(x, group=group, group_dst=after, tag=3)]
        assert dist.get_group_rank(group, dist.recv(y, group=group, tag=3)) == before
    else:
        works = [dist.isend(x, group=group, group_dst=after, tag=5)]
        dist.recv(y, group=group, group_src=before, tag=5)
    for work in works:
        work.wait()
    return as_numpy(y)


def by_functions(_, size, program):
    """Return the calls of a program whose results are wrong on this rank."""
    if dist.get_rank() >= size:
        return []
    group, found = GROUPS[size], []
    rank = group.rank()
    for call, mode, form in program:
        if call.kind is O.Broadcast and size > 1:
            seen = pass_round(group, call.inputs[rank], call.layout, form)
            if not reference.same_bits(seen, call.inputs[rank - 1]):
                found.append(f"{form}, {call.layout}: {seen} is not {call.inputs[rank - 1]}")
        for op in perform(group, call, mode):
            found += [f"{mode}: {text}" for text in wrong(call, rank, op)]
    return found


@st.composite
def programs(draw):
    """Draw a group's size and a program for it."""
    size = draw(st.sampled_from([2, SIZE, 1]))
    step = st.tuples(
        strategies.calls(size).filter(torch_has),
        st.sampled_from(["blocking", "async", "coalesced"]),
        st.sampled_from(["isend", "batch", "any source"]),
    )
    return size, draw(st.lists(step, min_size=2, max_size=8))


@settings(max_examples=PROGRAMS, deadline=None)
@given(drawn=programs())
def test_a_program_has_the_results_of_the_oracle(ranks, drawn):
    size, program = drawn
    answers = ranks.run(by_functions, [size] * SIZE, [program] * SIZE)
    assert answers == [[]] * SIZE
