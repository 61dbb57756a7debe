"""Drawn programs of calls of torch.distributed have the results of nc10d's oracle.

Calls, dtypes, layouts, reductions, roots and sizes are drawn, and how each call is made: blocking,
asynchronous, or several times in torch's coalescing manager. Messages go between the calls.
"""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d.torch
from nc10d import ops as O
from nc10d.arrays.dtypes import ElementKind, dtype_of
from nc10d.testing import Ranks, layouts, reference, strategies
from nc10d.torch.tensors import as_numpy, as_tensor

LARGEST = 3
PROGRAMS = int(os.environ.get("TORCH_PROGRAMS", "60"))  # 2000 in docs/torch.md
TOGETHER = (O.AllReduce, O.AllGather, O.ReduceScatter)
"""What torch's coalescing manager collects itself, if it is flat."""
GROUPS = {}
# Their new names, where torch warns of the old ones.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(LARGEST, "processes", timeout=60) as started:
        started.run(start)
        yield started


def start(group):
    nc10d.torch.as_torch_group()
    GROUPS.update({size: dist.new_group([*range(size)]) for size in range(1, LARGEST + 1)})


def of(x):
    """Return tensors in the memory of an array or of a list of arrays; None stays None."""
    if x is None:
        return None
    return [as_tensor(each) for each in x] if isinstance(x, list) else as_tensor(x)


def reduction(op):
    if op.factor is not None:
        return dist._make_nccl_premul_sum(op.factor)
    return dist.ReduceOp(dist.ReduceOp.RedOpType(op.kind.number))


def by_form(x, listed, flat):
    return listed if isinstance(x, list) else flat


MAKE = {
    O.AllReduce: lambda o, **how: dist.all_reduce(of(o.x), reduction(o.op), **how),
    O.Reduce: lambda o, **how: dist.reduce(of(o.x), group_dst=o.root, op=reduction(o.op), **how),
    O.Broadcast: lambda o, **how: dist.broadcast(of(o.x), group_src=o.root, **how),
    O.AllGather: lambda o, **how: by_form(o.out, dist.all_gather, ALL_GATHER)(
        of(o.out), of(o.inp), **how
    ),
    O.ReduceScatter: lambda o, **how: by_form(o.inp, dist.reduce_scatter, REDUCE_SCATTER)(
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


def torch_has(call):
    """Return whether torch.distributed has the call, and passes its reduction on."""
    lacks = call.kind in (O.Scan, O.ExScan)
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
        work = MAKE[call.kind](op, group=group, async_op=mode == "async")
        assert (work is None) == (mode != "async")
        if work is not None:
            work.wait()
        return [op]
    ops = [call.make(group.rank()) for _ in range(3)]
    plain = call.kind in TOGETHER and (call.flat or call.kind is O.AllReduce)
    device = None if plain else torch.device("cpu")
    with dist._coalescing_manager(group, device, async_ops=True) as block:
        for op in ops:
            MAKE[call.kind](op, group=group, async_op=not plain)
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


def complaints(group, size, program):
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
            if isinstance(op, O.Gather) and rank != call.root:
                continue
            outputs, expected = strategies.outputs(op), call.expected()[rank]
            seen = [as_numpy(as_tensor(x)) for x in outputs]
            if not all(map(reference.same_bits, seen, expected)):
                what = f"{call.kind.__name__} {call.op} {call.layout} {mode}, flat={call.flat}"
                found.append(f"{what}: {seen} is not {expected}"[:400])
            assert all(map(layouts.intact, outputs))
    return found


@st.composite
def programs(draw):
    """Draw a group's size and a program for it."""
    size = draw(st.sampled_from([2, LARGEST, 1]))
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
    answers = ranks.run(complaints, [size] * LARGEST, [program] * LARGEST)
    assert answers == [[]] * LARGEST
