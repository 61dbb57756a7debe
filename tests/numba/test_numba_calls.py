"""nc10d.numba: calls from compiled code do what nc10d's own do, without the GIL once prepared."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit, types
from numba.core.errors import TypingError

import nc10d as dist
from nc10d import numba as nb
from nc10d.arrays.dtypes import DType
from nc10d.numba import compiled_calls
from nc10d.testing import reference, run_ranks
from nc10d.testing.strategies import mixed_values


@njit(nogil=True)
def reduced(x: Any) -> None:
    nb.all_reduce(x)


@njit(nogil=True)
def reduced_by_max(x: Any) -> None:
    nb.all_reduce(x, nb.MAX)


@njit(nogil=True)
def copied(x: Any, src: int) -> None:
    nb.broadcast(x, src)


@njit(nogil=True)
def sent(x: Any, dst: int, tag: int) -> None:
    nb.send(x, dst, tag)


@njit(nogil=True)
def received(x: Any, src: int, tag: int) -> None:
    nb.recv(x, src, tag)


@njit(nogil=True)
def round_trips(x: Any, rank: int, count: int) -> int:
    """Reduce, meet and pass a message to and fro; all in compiled code."""
    for _ in range(count):
        nb.all_reduce(x)
        nb.barrier()
        if rank == 0:
            nb.send(x, 1)
            nb.recv(x, 1, 3)
        else:
            nb.recv(x, 0)
            nb.send(x, 0, 3)
    return 1


def every_call(group: Any) -> None:
    rank, size = group.rank, group.size
    for dtype in (DType.FLOAT64, DType.BOOL):  # each is compiled
        for count in (0, 1, 1000):
            inputs = [mixed_values(dtype, count, r) for r in range(size)]
            for _ in range(3):  # first the slow way, then by the published call
                x = inputs[rank].copy()
                reduced(x)
                assert reference.same_bits(x, reference.all_reduce(inputs)[rank])
                x = inputs[rank].copy()
                copied(x, size - 1)
                assert reference.same_bits(x, inputs[size - 1])
                if rank == 0:
                    sent(inputs[0], 1, 7)
                if rank == 1:
                    received(x, 0, 7)
                    assert reference.same_bits(x, inputs[0])
    x = np.array([[rank, -rank]], np.int32)
    reduced_by_max(x)
    assert x.tolist() == [[size - 1, 0]]


def mistakes(group: Any) -> None:
    x = np.zeros(2)
    with pytest.raises(ValueError, match="send: dst must be a rank of the group"):
        sent(x, 9, 0)
    with pytest.raises(ValueError, match="tag must be 0 or more"):
        sent(x, 1 - group.rank, -1)
    with pytest.raises(TypeError, match="MAX"):
        reduced_by_max(np.zeros(2, np.complex64))
    with pytest.raises(TypingError, match="needs a C-contiguous array"):
        reduced(np.zeros((4, 4))[:, 1])
    with pytest.raises(TypingError, match="read-only"):
        reduced(_read_only(x))


def _read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.ranks(2, strict=False)
def test_calls_from_compiled_code_are_those_of_python(world: Any) -> None:
    every_call(world)
    mistakes(world)


def in_compiled_code_alone(group: Any) -> None:
    """From the second round on no call goes through Python, unless something observes."""
    seen: list[int] = []
    x = np.ones(3)
    round_trips(x, group.rank, 2)
    published = len(compiled_calls._blocks)
    assert published == 4, "all_reduce, barrier, send and recv"
    x[:] = 1
    assert round_trips(x, group.rank, 100) == 1
    assert (x == 2.0**100).all()
    stop = group.observe(lambda *call: seen.append(call[2]))
    round_trips(x, group.rank, 2)
    stop()
    assert len(seen) == 8, "an observer sees every call"
    assert len(compiled_calls._blocks) == published


def in_a_process_of_its_own(group: Any) -> None:
    in_compiled_code_alone(group)
    every_call(group)
    two_threads(group)
    x = np.ones(3)
    if group.rank == 1:
        group.store.wait(["ready"])
        group.abort("to see what happens")
    else:
        group.store.set("ready", "1")
    with pytest.raises(dist.Aborted, match="to see what happens"):
        round_trips(x, group.rank, 100)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="no default process group"):
        reduced(x)


def two_threads(group: Any) -> None:
    """Without the GIL, both threads of a rank wait for messages of the other's at once."""
    rank, results = group.rank, np.zeros((2, 4))

    def work(number: int) -> None:
        for turn in range(20):
            if rank == number:
                sent(np.full(4, turn + 10.0 * number), 1 - rank, number)
            else:
                received(results[number], 1 - rank, number)

    others = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert (results[1 - rank] == 19 + 10 * (1 - rank)).all()


@pytest.mark.slow
def test_prepared_calls_are_found_by_compiled_code_and_failures_are_raised_there() -> None:
    run_ranks(in_a_process_of_its_own, 2, "processes")


def behind_any_source(group: Any) -> None:
    """A prepared receive of compiled code stays behind a receive from any source."""
    x, first = np.zeros(1, np.int64), np.zeros(1, np.int64)
    if group.rank:
        for number in range(6):
            if number == 4:
                group.barrier()
            group.send(np.array([number]), 0, tag=3)
        return
    for number in range(4):
        received(x, 1, 3)
        assert x[0] == number
    work = group.irecv(first, None, tag=3)
    group.barrier()
    received(x, 1, 3)
    assert (first[0], x[0]) == (4, 5)
    work.wait()


def test_compiled_code_does_not_overtake_a_receive_from_any_source() -> None:
    run_ranks(behind_any_source, 2, "processes")


def in_a_block(group: Any) -> None:
    """A block takes no call of compiled code, whose arrays may be gone at its end."""
    with dist.coalescing_manager():
        for call in (lambda: reduced(np.ones(3)), lambda: received(np.zeros(1, np.int64), 1, 3)):
            with pytest.raises(ValueError, match="a call of compiled code is not possible inside"):
                call()
    x = np.ones(3)
    reduced(x)
    assert (x == group.size).all()


def test_compiled_code_joins_no_block() -> None:
    run_ranks(in_a_block, 2, "processes")


@pytest.mark.parametrize("rank_type", [types.float64, types.complex64])
def test_ranks_and_tags_are_integers(rank_type: Any) -> None:
    x = types.Array(types.float64, 1, "C")
    for function, arguments in (
        (lambda x, src: nb.broadcast(x, src), (x, rank_type)),
        (lambda x, dst: nb.send(x, dst), (x, rank_type)),
        (lambda x, tag: nb.send(x, 1, tag), (x, rank_type)),
        (lambda x, src: nb.recv(x, src), (x, rank_type)),
    ):
        with pytest.raises(TypingError, match="must be an integer"):
            njit(function).compile(arguments)


def test_a_cached_function_finds_its_calls_in_the_next_process(tmp_path: Path) -> None:
    program = tmp_path / "cached.py"
    program.write_text(
        "import numpy as np\n"
        "from numba import njit\n"
        "import nc10d as dist\n"
        "from nc10d import numba as nb\n"
        "@njit(nogil=True, cache=True)\n"
        "def total(x):\n"
        "    nb.all_reduce(x)\n"
        "    return x.sum()\n"
        "dist.init_process_group(init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "assert [total(np.ones(3)) for _ in range(3)] == [3.0] * 3\n"
        "print(sum(total.stats.cache_hits.values()))\n"
    )
    for hits in ("0", "1"):
        command = [sys.executable, str(program)]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        assert ended.stdout.split() == [hits]


@pytest.mark.ranks(2, strict=False)
def test_outside_compiled_code_they_are_plain_calls(world: Any) -> None:
    x = np.full(2, world.rank + 1.0)
    nb.all_reduce(x, nb.PRODUCT)
    assert (x == 2).all()
    nb.broadcast(x, 0)
    nb.barrier()
    if world.rank == 0:
        nb.send(x, 1)
    else:
        nb.recv(x, 0)
    with pytest.raises(ValueError, match="8 is not a valid"):
        nb.all_reduce(x, 8)
