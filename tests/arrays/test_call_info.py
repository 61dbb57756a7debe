"""Ranks compare the same facts of a call on every backend, and see each of them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from call_pairs import ALL, EQUAL, KINDS, PAIRS, SIZE, Call, x

import nc10d as dist
from nc10d import ops as O
from nc10d.arrays.call_info import CallInfo, beyond_text, block_of, call_of
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.lowering.lower import lower
from nc10d.backend.nccl.launch.compared_call import compared, text_of_all_reduces
from nc10d.errors import CollectiveMismatch
from nc10d.group.process_group import ProcessGroup
from nc10d.ops.facts import COLLECTIVE_KINDS
from nc10d.testing import run_ranks
from nc10d.testing.local_backend import run_local

SHAPES = [GroupShape(SIZE, rank, 256 * 1024, 64 * 1024) for rank in range(SIZE)]
VIEWS: dict[str, Callable[[O.Op, int], object]] = {
    "cpu": lambda op, rank: lower(op, SHAPES[rank]).build().call.fingerprint(),
    "nccl": lambda op, rank: compared([op]).fingerprint(),
    "mpi, ucc": lambda op, rank: call_of(op).fingerprint(),
    "simulated, local": lambda op, rank: call_of(op).describe(),
}
"""What each backend compares of a call on a rank."""


def test_the_pairs_have_every_collective() -> None:
    kinds = {type(call(0)) for call in ALL}
    assert kinds == set(COLLECTIVE_KINDS)
    assert set(KINDS) <= {call_of(call(0)).op for call in ALL}


@pytest.mark.parametrize("backend", VIEWS)
def test_calls_that_differ_in_one_fact_differ_on_every_backend(backend: str) -> None:
    seen = {VIEWS[backend](call(0), 0) for call in ALL}
    assert len(seen) == len(ALL)
    for name, (first, second) in PAIRS.items():
        assert VIEWS[backend](first(0), 0) != VIEWS[backend](second(1), 1), name


@pytest.mark.parametrize("backend", VIEWS)
def test_equal_calls_are_equal_on_every_backend(backend: str) -> None:
    for name, (first, second) in EQUAL.items():
        lists = name.endswith("in a list")
        same = VIEWS[backend](first(0), 0) == VIEWS[backend](second(1), 1)
        assert same == (backend != "nccl" or not lists), name


def launched(group: ProcessGroup, pair: tuple[Call, Call]) -> str:
    """Launch a rank's call of a pair; return its error's text."""
    op = pair[group.rank](group.rank)
    try:
        group.backend("cpu").launch([op], 20.0, False)
    except CollectiveMismatch as error:
        return str(error)
    return ""


def all_launched(world: ProcessGroup) -> dict[str, str]:
    """Launch each pair in a group of its own; return the errors."""
    texts = {}
    for name, pair in (*PAIRS.items(), *EQUAL.items()):
        group = dist.new_group()
        assert isinstance(group, ProcessGroup)
        texts[f"{name in EQUAL} {name}"] = launched(group, pair)
        dist.destroy_process_group(group)
    return texts


RUNS: dict[str, Callable[[], Sequence[dict[str, str]]]] = {
    "cpu": lambda: run_ranks(all_launched, SIZE, "threads"),
    "simulated": lambda: run_ranks(all_launched, SIZE, "simulated"),
    "local": lambda: run_local(all_launched, SIZE),
}


@pytest.mark.parametrize("backend", RUNS)
def test_ranks_raise_the_same_error_where_one_fact_differs(backend: str) -> None:
    mine, theirs = RUNS[backend]()
    assert mine == theirs
    assert len(mine) == len(PAIRS) + len(EQUAL)
    for name, text in mine.items():
        assert (text == "") == name.startswith("True"), (name, text)


def sums(*counts: int, root: int = -1, dtype: str = "f8") -> list[CallInfo]:
    if root >= 0:
        return [call_of(O.Broadcast(x(count, dtype), root)) for count in counts]
    return [call_of(O.AllReduce(x(count, dtype))) for count in counts]


BLOCKS: dict[str, tuple[list[CallInfo], str]] = {
    "one call": (sums(3), "all_reduce(dtype=float64, count=3, op=SUM)"),
    "sizes": (
        sums(3, 4, 5),
        "coalesced(3 calls, count=12: all_reduce(dtype=float64, op=SUM) of 3, 4, 5)",
    ),
    "equal sizes": (
        sums(3, 3, 5, 5, 5),
        "coalesced(5 calls, count=21: all_reduce(dtype=float64, op=SUM) of 2 x 3, 3 x 5)",
    ),
    "kinds": (
        [*sums(3), *sums(4, root=1), call_of(O.Barrier()), call_of(O.Barrier())],
        "coalesced(4 calls, count=7: all_reduce(dtype=float64, count=3, op=SUM), "
        "broadcast(dtype=float64, count=4, root=1), 2 x barrier())",
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_text_of_a_block_has_each_call(name: str) -> None:
    calls, text = BLOCKS[name]
    assert block_of(calls).describe() == text


def test_blocks_differ_by_any_call_in_them() -> None:
    blocks = [sums(3, 4), sums(3, 5), sums(4, 3), sums(3, 4, 4), sums(3, 4, root=0), sums(3, 3, 4)]
    assert len({block_of(calls).fingerprint() for calls in blocks}) == len(blocks)
    assert len({block_of(calls).describe() for calls in blocks}) == len(blocks)


def test_a_long_text_says_that_it_is_cut() -> None:
    long, longer = (block_of(sums(*range(200), last)) for last in (1, 2))
    assert long.fingerprint() != longer.fingerprint()
    # The sum of all elements tells them apart even so.
    assert long.text_bytes(112) != longer.text_bytes(112)
    assert long.text_bytes(112).endswith(b"...")
    assert call_of(O.Barrier()).text_bytes(12) == b"barrier()\0\0\0"
    assert beyond_text("a...", "a...")
    assert not beyond_text("a...", "b...")
    assert not beyond_text("", "")


def test_a_uniform_block_on_nccl_is_that_of_its_operations() -> None:
    block = compared(O.AllReduces([x(3), x(4)], O.MAX))
    text = text_of_all_reduces("float64", "MAX", (3, 4))
    assert np.frombuffer(text._words, np.int64)[0] == block.fingerprint()


def different_blocks(group: ProcessGroup, sizes: list[int]) -> str:
    arrays: list[Any] = [np.ones(size) for size in sizes]
    with pytest.raises(CollectiveMismatch) as caught:
        group.launch([O.AllReduce(array) for array in arrays])
    assert all((array == 1).all() for array in arrays)
    return str(caught.value)


def test_blocks_that_differ_show_their_calls_and_sizes() -> None:
    one, other = run_ranks(different_blocks, 2, "threads", [[3, 4], [3, 5]])
    assert one == other
    assert "all_reduce(dtype=float64, op=SUM) of 3, 4) at " in one
    assert "all_reduce(dtype=float64, op=SUM) of 3, 5) at " in one
