"""Plain arrays so large that the kernel copies them; and a peer that dies meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import nc10d
from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS
from nc10d.backend.cpu.membership import formation
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, MAX, SUM
from nc10d.store import TCPStore
from nc10d.testing import reference, run_ranks
from nc10d.testing.reference import same_bits

READ_FROM = DEFAULTS.read_from
COUNT = READ_FROM // 4 + 5
LARGE = 4 * READ_FROM  # bytes of a message that its receiver reads by the kernel


def inputs(size: int, seed: int) -> list[Any]:
    """Every rank's array: a little more than the kernel is asked for, and no round number."""
    return [np.random.default_rng(seed * size + r).random(COUNT, np.float32) for r in range(size)]


def reductions(group: ProcessGroup) -> None:
    """At odd addresses, beside a registered array, and with an output inside the input."""
    me, size = group.rank, group.size
    for seed in range(3):
        plain = inputs(size, seed)
        for op in (SUM, AVG):
            x = np.empty(COUNT + 1, np.float32)[1:]
            x[:] = plain[me]
            mixed = nc10d.from_numpy(x, group) if me == 0 and seed == 1 else x
            group.all_reduce(mixed, op)
            assert same_bits(mixed, reference.all_reduce(plain, op)[me])
        chunks = [array[: COUNT // size * size].reshape(size, -1) for array in plain]
        out, source = np.empty(COUNT // size, np.float32), chunks[me].reshape(-1).copy()
        group.reduce_scatter_tensor(out, source)
        assert same_bits(out, reference.reduce_scatter(chunks, SUM)[me])
        inside = source.reshape(size, -1)[me]
        group.reduce_scatter_tensor(inside, source)
        assert same_bits(inside, out)


def on_small_staging(group: ProcessGroup) -> None:
    """Groups that come after many others have staging buffers of an eighth of the size."""
    formation.LARGE_SLOT = formation.SMALL_SLOT
    small = group.split_group([list(range(group.size))])
    assert small is not None
    reductions(small)


@pytest.mark.parametrize(
    ("size", "calls"),
    [
        (2, on_small_staging),
        (3, reductions),
        pytest.param(2, reductions, marks=pytest.mark.long),
        pytest.param(3, on_small_staging, marks=pytest.mark.long),
    ],
)
def test_large_plain_arrays_are_reduced_in_place(size: int, calls: Any) -> None:
    run_ranks(calls, size, "processes")


def test_threads_read_large_plain_arrays_without_the_kernel() -> None:
    run_ranks(reductions, 3)


def outlives(group: ProcessGroup, seed: int) -> None:
    """Kill rank 1 at some moment; rank 0, which may be reading its memory, raises PeerLost."""
    x, out = np.ones(4 << 20, np.float32), np.empty(2 << 20, np.float32)
    some = x[: READ_FROM // 16].copy()
    group.all_reduce(x, MAX)
    if group.rank == 1:
        threading.Timer(0.003 + 0.01 * seed, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            group.all_reduce(x, MAX)
            group.reduce_scatter_tensor(out, x, MAX)
            group.broadcast(x, 0)
            group.all_gather_into_tensor(out[: 2 * some.size], some)
            assert (out == 1).all()
    except nc10d.PeerLost as lost:
        if (lost.rank, lost.cause) != (1, "killed by signal 9"):
            raise


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_reads_a_dying_peers_memory_raises_peer_lost(seed: int) -> None:
    with pytest.raises(RuntimeError, match="code -9") as caught:
        run_ranks(outlives, 2, "processes", [seed, seed])
    notes = getattr(caught.value, "__notes__", [])
    assert not any("rank 0" in note for note in notes), notes


def sends_what_is_gone(group: ProcessGroup) -> str:
    """The array of rank 2 can't be read any more when rank 0 receives it."""
    group.barrier()
    if group.rank == 1:
        with pytest.raises(nc10d.PeerLost) as caught:
            group.barrier()
        return str(caught.value)
    memory = mmap.mmap(-1, LARGE)
    x = np.frombuffer(memory, np.uint8)
    if group.rank == 2:
        libc = ctypes.CDLL(None, use_errno=True)
        place, size = ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(LARGE)
        assert libc.mprotect(place, size, 0) == 0, ctypes.get_errno()
    with pytest.raises(nc10d.PeerLost) as caught:
        group.send(x, 0, tag=9) if group.rank == 2 else group.recv(x, 2, tag=9)
    assert (caught.value.rank, caught.value.op) == (2, "recv")
    return str(caught.value)


def test_a_message_that_cannot_be_read_names_sender_and_call() -> None:
    texts = run_ranks(sends_what_is_gone, 3, "processes")
    assert len(set(texts)) == 1
    assert "the memory of rank 2 " in texts[0]
    assert "by rank 0 in recv #1 of group 'world'" in texts[0]


FIRST_OF_A_CONTAINER = """
import os, sys
import numpy as np
import nc10d as dist

assert os.getpid() == 1
dist.init_process_group("cpu")
x = np.full(int(sys.argv[1]), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert (x == 3).all()
dist.destroy_process_group()
"""
ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_be_alone() -> bool:
    if shutil.which(ALONE[0]) is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_be_alone(), reason="no namespaces of processes can be made here")
def test_two_processes_with_the_same_pid_are_told_apart() -> None:
    with contextlib.closing(TCPStore("127.0.0.1", is_master=True)) as store:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
        command = [*ALONE, sys.executable, "-c", FIRST_OF_A_CONTAINER, str(COUNT)]
        env = {**os.environ, **where, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = [subprocess.Popen(command, env={**env, "RANK": str(r)}) for r in range(2)]
        try:
            assert [rank.wait(60) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
