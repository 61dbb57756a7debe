"""Private arrays that processes expose for writing: the kernel writes results there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_readers import reading, released, slow_reader

from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS, DIRECT
from nc10d.backend.cpu.lowering.lower import ProgramCache
from nc10d.backend.cpu.memory import peer_access as reach
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.native.peer_array_steps import AT_A_TIME
from nc10d.errors import Aborted
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, MAX, MIN, SUM
from nc10d.testing import Ranks, reference
from nc10d.testing.reference import same_bits

BYTES = at.AREA_WRITABLE_BYTES // 8
WRITER = at.AREA_WRITER // 8
ROUNDS = 20
READ_FROM, WRITE_FROM = DEFAULTS.read_from, DEFAULTS.write_from
WRITING = {
    "all_reduce": "FOLD_EXPOSED",
    "broadcast": "FILL_EXPOSED",
    "all_gather": "FILL_EXPOSED",
    "all_to_all": "FILL_EXPOSED",
}
"""The calls in which a peer writes into an exposed array, and the step that does."""


@pytest.fixture(scope="module")
def writers() -> Iterator[Ranks]:
    yield from able_to_write(2)


@pytest.fixture(scope="module")
def three_writers() -> Iterator[Ranks]:
    yield from able_to_write(3)


def able_to_write(size: int) -> Iterator[Ranks]:
    with Ranks(size, "processes") as ranks:
        if ranks.run(access) != [at.WRITES] * size:
            pytest.skip("the kernel lets no process write into another one here")
        yield ranks


def access(group: ProcessGroup) -> int:
    backend: Any = group.backend("cpu")
    found: int = backend.group.memory.access()
    return found


def pieces(group: ProcessGroup) -> None:
    """Reduce arrays that begin and end anywhere, and check the bytes beside them."""
    much = AT_A_TIME // 4 + 1
    for op in (SUM, AVG, MAX):
        for start, more in ((0, 0), (1, 3), (1023, 1025), (7, much), (2, 4 * WRITE_FROM)):
            count = WRITE_FROM // 4 + more
            wholes = [np.arange(count + 2048, dtype=np.float32) * (r + 0.3) for r in range(2)]
            mine = wholes[group.rank].copy()
            group.all_reduce(mine[start : start + count], op)
            inputs = [whole[start : start + count] for whole in wholes]
            want = reference.all_reduce(inputs, op)[group.rank]
            assert same_bits(mine[start : start + count], want)
            assert same_bits(mine[:start], wholes[group.rank][:start])
            assert same_bits(mine[start + count :], wholes[group.rank][start + count :])


def test_arrays_of_any_place_and_length_are_reduced_in_place(writers: Ranks) -> None:
    writers.run(pieces)


def filled_pieces(group: ProcessGroup) -> None:
    """Broadcast arrays that begin and end anywhere, and check the bytes beside them."""
    page, size = 1024, group.size
    least = (DIRECT if size == 2 else READ_FROM) // 4
    places = (0, least), (1, least + 3), (page - 1, least + AT_A_TIME // 4 + 1), (2, 4 * least)
    for root, (start, count) in product(range(size), places):
        wholes = [np.arange(count + 2 * page, dtype=np.float32) * (r + 0.3) for r in range(size)]
        mine = wholes[group.rank].copy()
        group.broadcast(mine[start : start + count], root)
        wholes[group.rank][start : start + count] = wholes[root][start : start + count]
        assert same_bits(mine, wholes[group.rank])


def test_arrays_of_any_place_and_length_are_filled_in_place(writers: Ranks) -> None:
    writers.run(filled_pieces)


def test_arrays_of_three_ranks_are_filled_in_place(three_writers: Ranks) -> None:
    three_writers.run(filled_pieces)


def swapped_pieces(group: ProcessGroup) -> None:
    """Gather and exchange parts of arrays, and check the bytes beside them."""
    page, many = 1024, WRITE_FROM // 8
    for start, count in ((0, many), (1, many + 1), (page - 1, 2 * many - 3), (3, 8 * many)):
        out = np.zeros(2 * count + 2 * page, np.float32)
        want, middle = out.copy(), slice(start, start + 2 * count)
        inps = [np.arange(2 * count, dtype=np.float32) * (rank + 0.3) for rank in range(2)]
        group.all_gather_into_tensor(out[middle], inps[group.rank][:count])
        want[middle] = np.concatenate([inp[:count] for inp in inps])
        assert same_bits(out, want)
        group.all_to_all_single(out[middle], inps[group.rank])
        want[middle] = np.concatenate([np.split(inp, 2)[group.rank] for inp in inps])
        assert same_bits(out, want)


def test_arrays_of_any_place_and_length_are_swapped(writers: Ranks) -> None:
    writers.run(swapped_pieces)


def exposed_by_first(group: ProcessGroup, name: str, x: Any) -> None:
    """Make a call in which rank 1 writes into rank 0's exposed part of x; results are at most 2."""
    some = x[: x.size // 2]
    mine = np.full(some.size, group.rank, x.dtype)
    if name == "all_reduce":
        group.all_reduce(x, MIN)
    elif name == "broadcast":
        group.broadcast(x, 1)
    elif name == "all_gather":
        group.all_gather_into_tensor(some, mine[: some.size // 2])
    else:
        group.all_to_all_single(some, mine)


def aborts(group: ProcessGroup, name: str, seed: int) -> None:
    """Rank 0 leaves a call at any moment, while rank 1 is stopped; that goes on afterwards."""
    moments, pids = random.Random(seed), np.zeros(group.size, np.int64)
    group.all_gather_into_tensor(pids, np.array([os.getpid()]))
    # Compiled here: a rank that is stopped while it compiles lets all others wait for its lock.
    exposed_by_first(group, name, np.ones(READ_FROM // 4, np.float32))
    for _ in range(ROUNDS):
        other = group.split_group([list(range(group.size))])
        assert other is not None
        x = np.ones(READ_FROM // 4, np.float32)
        other.all_reduce(x, MAX)

        def leave(other: ProcessGroup = other) -> None:
            os.kill(int(pids[1]), signal.SIGSTOP)
            other.abort("enough")

        if group.rank == 0:
            threading.Timer(moments.uniform(0, 0.002), leave).start()
        with contextlib.suppress(Aborted):
            while True:
                exposed_by_first(other, name, x)
        x[...] = 666
        if group.rank == 0:
            os.kill(int(pids[1]), signal.SIGCONT)
        group.barrier()
        assert (x == 666).all(), "a peer wrote into an array that was its caller's again"


@pytest.mark.parametrize("name", WRITING)
def test_no_peer_writes_into_the_array_of_an_abandoned_call(name: str, writers: Ranks) -> None:
    for seed in range(2):
        writers.run(aborts, [name] * 2, [seed] * 2)


def test_no_peer_of_several_writes_into_the_array_of_an_abandoned_call(
    three_writers: Ranks,
) -> None:
    for seed in range(2):
        three_writers.run(aborts, ["broadcast"] * 3, [seed] * 3)


def gives_up(group: ProcessGroup, name: str, folder: Path) -> None:
    """Rank 1 rests before it writes; rank 0 leaves the call and has its array again."""
    x = np.full(WRITE_FROM // 4, 1.0 + group.rank)
    other = group.split_group([[0, 1]])
    assert other is not None
    if group.rank == 0:

        def abort() -> None:
            assert announced(folder / "reading")
            other.abort("enough")

        threading.Thread(target=abort, daemon=True).start()
        with pytest.raises(Aborted):
            exposed_by_first(other, name, x)
        x[...] = 666
        announce(folder / "released")
        assert announced(folder / "left")
        assert (x == 666).all(), "a late peer wrote into an array that was its caller's again"
        return

    def rest() -> None:
        assert reading.wait(30)
        announce(folder / "reading")
        assert announced(folder / "released")
        released.set()

    reading.clear()
    released.clear()
    resting = threading.Thread(target=rest, daemon=True)
    resting.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramCache, "linked", slow_reader(WRITING[name]))
        with pytest.raises(Aborted):
            exposed_by_first(other, name, x)
    resting.join()
    announce(folder / "left")


def announce(fifo: Path) -> None:
    fifo.write_text("now")


def announced(fifo: Path) -> bool:
    return fifo.read_text() == "now"


@pytest.mark.parametrize("name", WRITING)
def test_a_late_peer_writes_nothing_into_a_withdrawn_array(
    name: str, tmp_path: Path, writers: Ranks
) -> None:
    for fifo in ("reading", "released", "left"):
        os.mkfifo(tmp_path / fifo)
    writers.run(gives_up, [name] * 2, [tmp_path] * 2)


ENDS: dict[str, Callable[[subprocess.Popen[bytes], reach.Words], object]] = {
    "is stopped": lambda child, _: child.send_signal(signal.SIGSTOP),
    "dies": lambda child, _: child.kill(),
    "is done": lambda _, words: words.__setitem__(WRITER, 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_exposed_is_mine_again_once_the_writer(end: str) -> None:
    """The words of an area that show a writing thread: the only thread of a busy process."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            takes_back(child, end)
        finally:
            child.kill()


def takes_back(child: subprocess.Popen[bytes], end: str) -> None:
    words = np.zeros(WRITER + 1, np.int64)
    words[[BYTES, WRITER]] = AT_A_TIME, child.pid
    taking = partial(reach.withdraw, plain.address(words), [child.pid])
    thread = threading.Thread(target=taking, daemon=True)
    thread.start()
    while words[BYTES] != 0:
        os.sched_yield()
    thread.join(0.1)
    assert thread.is_alive()
    ENDS[end](child, words)
    thread.join(30)
    assert not thread.is_alive()
