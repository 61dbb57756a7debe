"""Ranks that make different calls on devices raise the same error, over the emulators."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_ranks import afresh, after, device, full, once, ones, value
from emulated import emulated_ranks, emulators, needs_emulators

import nc10d as dist
from nc10d import cuda
from nc10d.errors import CollectiveMismatch
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import MAX, SUM, premul_sum
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators
Call = Callable[[ProcessGroup], Any]


def of_two(first: Call, second: Call) -> Call:
    return lambda group: (first if group.rank == 0 else second)(group)


def block(*counts: int) -> Call:
    def run(group: ProcessGroup) -> None:
        with group.coalescing_manager():
            for count in counts:
                group.all_reduce(ones(group, count))

    return run


def gathered(in_a_list: bool) -> Call:
    def run(group: ProcessGroup) -> None:
        if in_a_list:
            group.all_gather([ones(group, 4) for _ in range(group.size)], ones(group, 4))
        else:
            group.all_gather_into_tensor(ones(group, 4 * group.size), ones(group, 4))

    return run


DIFFERENT = {
    "count": (
        of_two(
            lambda g: g.all_reduce(ones(g, 5), async_op=True), lambda g: g.all_reduce(ones(g, 4))
        ),
        r"all_reduce\(dtype=float32, count=5, op=SUM\) at \S*test_nccl_mismatch.py:\d+",
        r"all_reduce\(dtype=float32, count=4, op=SUM\) at \S*test_nccl_mismatch.py:\d+",
    ),
    "dtype": (
        of_two(
            lambda g: g.all_reduce(cuda.to_device(np.ones(4), device(g)), async_op=True),
            lambda g: g.all_reduce(ones(g, 4)),
        ),
        "dtype=float64",
        "dtype=float32",
    ),
    "reduction": (
        of_two(
            lambda g: g.all_reduce(ones(g, 4), SUM, async_op=True),
            lambda g: g.all_reduce(ones(g, 4), MAX),
        ),
        "op=SUM",
        "op=MAX",
    ),
    "factor": (
        of_two(
            lambda g: g.all_reduce(ones(g, 4), premul_sum(0.5), async_op=True),
            lambda g: g.all_reduce(ones(g, 4), premul_sum(0.25)),
        ),
        r"op=PREMUL_SUM\(0.5\)",
        r"op=PREMUL_SUM\(0.25\)",
    ),
    "root": (lambda g: g.broadcast(ones(g, 4), g.rank, async_op=True), "root=0", "root=1"),
    "call": (
        of_two(lambda g: g.broadcast(ones(g, 4), 1), lambda g: g.reduce(ones(g, 4), 0)),
        r"broadcast\(dtype=float32, count=4, root=1\)",
        r"reduce\(dtype=float32, count=4, op=SUM, root=0\)",
    ),
    "list": (of_two(gathered(True), gathered(False)), "in a list", r"count=8\)"),
    "block": (of_two(block(3, 4), block(3, 5)), r"op=SUM\) of 3, 4\)", r"op=SUM\) of 3, 5\)"),
    "length of a block": (of_two(block(3, 4), block(3)), "of 3, 4", r"count=3, op=SUM\)"),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with emulated_ranks() as ranks:
        yield ranks


def failure(group: ProcessGroup, run: Callable[[], object]) -> CollectiveMismatch:
    """Return the mismatch that a call, or the next one, raises."""
    try:
        run()
        group.all_reduce(ones(group), async_op=True).wait_blocking()
    except CollectiveMismatch as error:
        return error
    raise AssertionError("nothing was refused")


def refused(group: ProcessGroup, case: str) -> str:
    mine = dist.new_group(range(group.size))
    assert isinstance(mine, ProcessGroup)
    run, *_ = DIFFERENT[case]
    x = ones(mine)
    mine.all_reduce(x)
    error = failure(mine, lambda: run(mine))
    assert value(x) == 2.0
    assert (error.group, error.seq) == (mine.name, 2)
    dist.destroy_process_group(mine)
    return str(error)


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_calls_are_one_error_that_names_both(two: Ranks, case: str) -> None:
    texts = two.run(refused, [case] * 2)
    assert texts[0] == texts[1]
    assert texts[0].startswith("ranks disagree on operation #2 on devices of group")
    for words in DIFFERENT[case][1:]:
        assert pytest.RaisesExc(AssertionError, match=words).matches(AssertionError(texts[0]))


def the_later_rank_has_not_entered_the_communicator(group: ProcessGroup) -> None:
    """NCCL's own call would have refused rank 1's call: the emulator fails the second of them."""
    x, y = full(group, 1.0), full(group, 1.0, 50)
    group.all_reduce(x)
    if group.rank == 0:
        work = group.all_reduce(x, async_op=True)
        once(group, "entered")
        with pytest.raises(CollectiveMismatch, match=r"rank 1 called .*count=50"):
            work.wait_blocking()
    else:
        after(group, "entered")
        with pytest.raises(CollectiveMismatch, match=r"rank 1 called .*count=50"):
            group.all_reduce(y)
        assert value(y) == 1.0


def test_the_later_rank_of_a_mismatch_enters_nothing() -> None:
    faults = {"NC10D_EMULATED_FAULTS": "1/ncclAllReduce@2=die"}
    with emulated_ranks(**faults) as ranks:
        ranks.run(the_later_rank_has_not_entered_the_communicator)


def calls_of_ranks_that_run_ahead_are_compared(group: ProcessGroup) -> None:
    """Rank 0 launches a hundred calls before rank 1 launches its first that differs."""
    x = ones(group, 8)
    group.all_reduce(x)
    if group.rank == 0:
        works = [group.all_reduce(x, async_op=True) for _ in range(100)]
        once(group, "ahead")
    else:
        after(group, "ahead")
        works = [group.all_reduce(x, async_op=True) for _ in range(49)]
        with pytest.raises(CollectiveMismatch, match=r"#51 .*count=9"):
            group.all_reduce(ones(group, 9))
    assert "#51 " in str(failure(group, works[-1].wait_blocking))


def the_first_calls_are_compared(group: ProcessGroup) -> None:
    """Both launches are deferred, since the communicator has not formed."""
    error = failure(group, lambda: group.all_reduce(ones(group, 5 + group.rank), async_op=True))
    assert "#1 " in str(error)
    assert "count=5" in str(error)
    assert "count=6" in str(error)


@pytest.mark.parametrize(
    "law",
    [calls_of_ranks_that_run_ahead_are_compared, the_first_calls_are_compared],
    ids=lambda law: law.__name__,
)
def test_calls_are_compared(two: Ranks, law: Callable[..., None]) -> None:
    two.run(afresh, [law] * 2)


ACROSS_HOSTS = """
import sys
import numpy as np
import nc10d as dist
from nc10d import cuda

rank = int(sys.argv[1])
dist.init_process_group("cpu:cpu,cuda:nccl", init_method=sys.argv[2], rank=rank, world_size=2)
x = cuda.to_device(np.ones(8, np.float32), rank)
dist.all_reduce(x)
for _ in range(2 + rank):  # rank 1 makes its third call with other elements
    work = dist.all_reduce(x, async_op=True)
try:
    work = dist.all_reduce(cuda.to_device(np.ones(9, np.float32), rank), async_op=True)
    work.wait_blocking()
    work = dist.all_reduce(x, async_op=True)
    work.wait_blocking()
except dist.CollectiveMismatch as error:
    print(error)
"""


def test_hosts_compare_their_calls_while_operations_are_pending(tmp_path: Path) -> None:
    """The emulator hangs, as NCCL does, where it would refuse calls that differ."""
    with emulators(NC10D_EMULATED_FAULTS="ncclAllReduce@4=hang"):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", ACROSS_HOSTS, str(rank), f"file://{tmp_path}/store"],
                env={**os.environ, "NC10D_HOST_ID": host},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate("ab")
        ]
    texts = [process.communicate(timeout=100)[0] for process in started]
    assert texts[0] == texts[1]
    assert "ranks disagree on operation #4 on devices of group" in texts[0]
    assert "count=8" in texts[0]
    assert "count=9" in texts[0]
