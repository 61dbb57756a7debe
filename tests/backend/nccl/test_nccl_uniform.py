"""For a block of all_reduces, the fast path gives the general path's rows, or None."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.arrays.dtypes import DType
from nc10d.arrays.validate import validate
from nc10d.backend.nccl.bindings.native import GROUPED, WORDS, nc10d_nccl_same_objects
from nc10d.backend.nccl.launch.launch_table import in_groups
from nc10d.backend.nccl.launch.nccl_calls import CallContext, calls_of
from nc10d.backend.nccl.launch.planner import uniform_rows
from nc10d.cuda.memory import DeviceArray
from nc10d.ops import AVG, BAND, MAX, SUM, AllReduces, premul_sum

DEVICE, FUNCTION, COMM, STREAM = 1, 11, 22, 33
DTYPES = [DType.FLOAT32, DType.COMPLEX64, DType.BOOL, DType.INT16, DType.FLOAT8_E5M2]
OPS = [SUM, MAX, AVG, BAND, premul_sum(0.5)]
PLACE = CallContext(0, 2, lambda _: True, lambda *_: 99, 0, fp8=False)


FLAWS = [None, "type", "empty", "touching", "unaligned", "elsewhere"]


@st.composite
def blocks(draw: st.DrawFn) -> AllReduces:
    """Draw uniform arrays that share no memory; a single array may have a flaw."""
    common = draw(st.sampled_from(DTYPES))
    flaw, where = draw(st.sampled_from(FLAWS)), draw(st.integers(0, 3))
    arrays, end = [], 4096
    for index in range(draw(st.integers(1, 8))):
        its = flaw if index == where else None
        dtype = draw(st.sampled_from(DTYPES)) if its == "type" else common
        count = 0 if its == "empty" else draw(st.integers(1, 100))
        start = end + {"touching": -8, "unaligned": 1}.get(its or "", 64)
        device = DEVICE + (its == "elsewhere")
        arrays.append(DeviceArray(start, (count,), dtype, device, None))
        end = start + arrays[-1].nbytes + 7 & ~7
    return AllReduces(draw(st.permutations(arrays)), draw(st.sampled_from(OPS)))


def by_the_long_way(ops: AllReduces) -> list[tuple[int, ...]] | None:
    """Return the rows of a group; None for mistakes and for calls that are not a plain group."""
    try:
        for op in ops:
            validate(op, 0, 2)
        calls = [calls_of(op, PLACE) for op in ops]
    except (TypeError, ValueError):
        return None
    elsewhere = any(x.device != DEVICE for x in ops.arrays)
    if elsewhere or not all(calls) or len(in_groups(ops)) > 1:
        return None
    return [(FUNCTION, 7, GROUPED, *call[1:], COMM, STREAM, 0) for rows in calls for call in rows]


def by_the_short_way(ops: AllReduces) -> Any:
    try:
        table = uniform_rows(ops, DEVICE, PLACE.fp8, (FUNCTION, COMM, STREAM))
    except TypeError:  # NCCL has no such reduction
        return None
    return None if table is None else list(zip(*[iter(table)] * WORDS, strict=True))


@settings(max_examples=500)
@given(blocks())
def test_the_fast_path_gives_the_general_paths_rows(ops: AllReduces) -> None:
    long, short = by_the_long_way(ops), by_the_short_way(ops)
    unlike = len({x.dtype for x in ops.arrays}) > 1  # NCCL may still reduce each array alone
    alone = len(ops) == 1 or ops.op is OPS[4]
    assert short == (None if alone or unlike or long is None else long)


def test_a_row_has_as_many_words_as_the_loop_reads() -> None:
    arrays = [DeviceArray(4096 * k, (3,), DType.FLOAT32, DEVICE, None) for k in (1, 2)]
    table = uniform_rows(AllReduces(arrays, SUM), DEVICE, True, (FUNCTION, COMM, STREAM))
    assert table is not None
    assert len(table) == 2 * WORDS


def test_arrays_in_any_order_are_disjoint_unless_two_overlap() -> None:
    starts = np.random.default_rng(0).permutation(1000).tolist()
    arrays = [DeviceArray(4096 + 64 * k, (16,), DType.FLOAT32, DEVICE, None) for k in starts]
    assert by_the_short_way(AllReduces(arrays, SUM)) == by_the_long_way(AllReduces(arrays, SUM))
    long = DeviceArray(4096 + 64 * 500, (17,), DType.FLOAT32, DEVICE, None)
    arrays[starts.index(500)] = long
    assert by_the_short_way(AllReduces(arrays, SUM)) is None


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(0, 3), max_size=5))
def test_lists_of_the_same_objects_are_the_same(some: list[int], others: list[int]) -> None:
    things = [object() for _ in range(4)]
    ids = array("q", [id(things[k]) for k in others])
    given = [things[k] for k in some]
    same = nc10d_nccl_same_objects(id(given), *ids.buffer_info())
    assert bool(same) == (some == others)
