"""A time-out tells seconds, line and awaited rank; a rank that has left is told of with its reason.

Ranks are threads, but where a process must end.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import nc10d as dist
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, DistError, PeerLost, RendezvousError
from nc10d.testing import run_ranks

HERE = r"at \S*test_told_reasons\.py:\d+"


def told(function: object, *arguments: object, kind: type[DistError] = DistError) -> str:
    with pytest.raises(kind) as caught:
        function(*arguments)  # type: ignore[operator]
    return str(caught.value)


def all_reduce_alone(group: dist.ProcessGroup) -> str:
    x = np.ones(3)
    group.all_reduce(x)
    if group.rank == 0:
        return told(lambda: group.all_reduce(x, timeout=0.3), kind=CollectiveTimeout)
    group.store.wait(["late"])
    return ""


def receive_alone(group: dist.ProcessGroup) -> str:
    if group.rank == 0:
        return told(lambda: group.recv(np.ones(3), 1, timeout=0.3), kind=CollectiveTimeout)
    group.store.wait(["late"])
    return ""


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (all_reduce_alone, r"all_reduce #2 of group 'world'"),
        (receive_alone, r"recv\(src=1, tag=0\) #1 of group 'world'"),
    ],
)
def test_a_timeout_tells_seconds_line_and_rank(function: object, call: str) -> None:
    def then_release(group: dist.ProcessGroup) -> str:
        text: str = function(group)  # type: ignore[operator]
        group.store.set("late", "")
        return text

    text = run_ranks(then_release, 2)[0]
    expected = rf"{call} {HERE} timed out on rank 0 after 0\.3 s, waiting for rank 1; a rank that"
    assert re.match(expected, text), text


def test_a_group_that_waits_for_a_rank_in_another_call_names_both_calls() -> None:
    def differ(group: dist.ProcessGroup) -> str:
        if group.rank == 0:
            text = told(lambda: dist.new_group([0, 1], timeout=0.5), kind=RendezvousError)
            group.abort("rank 0 gives up")
            return text
        return told(group.barrier)

    text, _ = run_ranks(differ, 2)
    assert re.search(rf"rank 0 timed out after 0\.5 s {HERE}: rank 1 did not join", text), text
    assert re.search(rf"rank 0 #1 new_group\('world/1'\) {HERE}, rank 1 #1 barrier", text), text


def test_a_barrier_that_waits_for_a_rank_in_new_group_names_both_calls() -> None:
    def differ(group: dist.ProcessGroup) -> str:
        if group.rank == 0:
            return told(lambda: dist.new_group([0, 1]))
        while "new_group" not in group.backend("cpu").whereabouts()[0]:
            pass
        return told(lambda: group.barrier(timeout=0.3), kind=CollectiveTimeout)

    in_group, in_barrier = run_ranks(differ, 2)
    assert re.match(rf"barrier #1 of group 'world' {HERE} timed out on rank 1", in_barrier)
    assert re.search(rf"rank 0 #1 new_group\('world/1'\) {HERE}", in_barrier), in_barrier
    assert in_group == in_barrier


def test_a_rank_that_leaves_amid_an_error_tells_it() -> None:
    def leave(group: dist.ProcessGroup) -> str:
        if group.rank == 0:
            return told(group.barrier, kind=PeerLost)
        try:
            raise ValueError("bad shape (3, 4)")
        except ValueError:
            dist.destroy_process_group()
        return ""

    text = run_ranks(leave, 2)[0]
    assert "rank 1 has left group 'world' (ValueError: bad shape (3, 4)), but" in text


def refused(group: dist.ProcessGroup) -> None:
    """Rank 0 alone gives an output that can't be written, or sends an object that is no array."""
    fixed = np.ones(3)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="must not be read-only"):
        group.reduce(fixed, 0)
    with pytest.raises(TypeError):
        group.send([1.0, 1.0, 1.0], 1)


def repeats(group: dist.ProcessGroup) -> str:
    x = np.ones(3)
    if group.rank == 0:
        refused(group)
    group.reduce(x, 0)
    if group.rank == 0:
        group.send(x, 1)
    else:
        group.recv(x, 0)
    return str(x[0])


def goes_on(group: dist.ProcessGroup) -> str:
    if group.rank == 0:
        refused(group)
        return told(group.barrier, kind=CollectiveMismatch)
    return told(lambda: group.reduce(np.ones(3), 0), kind=CollectiveMismatch)


def ends(group: dist.ProcessGroup) -> str:
    if group.rank:
        return told(lambda: group.recv(np.ones(3), 0), kind=PeerLost)
    try:
        group.send([1.0], 1)  # type: ignore[arg-type]
    except TypeError:
        dist.destroy_process_group()
    return ""


def test_peers_learn_of_a_refused_call_by_what_its_rank_does_next() -> None:
    assert run_ranks(repeats, 2) == ["2.0", "2.0"]
    one, other = run_ranks(goes_on, 2)
    assert one == other
    assert "rank 0 called barrier()" in one
    assert "rank 1 called reduce(" in one
    assert "rank 0 has left group 'world' (TypeError: send: " in run_ranks(ends, 2)[1]


def different_blocks(group: dist.ProcessGroup) -> str:
    x, y = np.ones(3), np.ones(2 + group.rank)

    def block() -> None:
        with dist.coalescing_manager():
            group.broadcast(x, 0)
            group.broadcast(y, 0)

    return told(block, kind=CollectiveMismatch)


def test_blocks_that_differ_are_told_by_their_sizes() -> None:
    text, _ = run_ranks(different_blocks, 2)
    for sizes in ("3, 2", "2 x 3"):
        assert f"broadcast(dtype=float64, root=0) of {sizes})" in text
    assert "2 calls, count=5" in text


ENDING = """
import sys
import nc10d as dist
rank = int(sys.argv[1])
dist.init_process_group(init_method="file://" + sys.argv[2], rank=rank, world_size=2, timeout=60)
if rank:
    {ending}
try:
    dist.barrier()
except dist.PeerLost as error:
    print(error.cause, "|", error)
"""


@pytest.mark.parametrize(
    ("ending", "cause"),
    [("raise KeyError('lr')", "KeyError: 'lr'"), ("sys.exit(3)", "it exited with code 3")],
)
def test_a_program_that_ends_tells_why(tmp_path: Path, ending: str, cause: str) -> None:
    command = [sys.executable, "-c", ENDING.format(ending=ending)]
    other = subprocess.Popen([*command, "1", str(tmp_path / "meet")], stderr=subprocess.DEVNULL)
    first = subprocess.run([*command, "0", str(tmp_path / "meet")], stdout=-1, text=True)
    other.wait()
    # A loaded machine may take longer than the patience for the code.
    assert first.stdout.startswith((f"{cause} |", "its program ends |")), first.stdout
    assert "rank 1 has left group 'world' (" in first.stdout
