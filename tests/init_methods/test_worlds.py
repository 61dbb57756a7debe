"""Worlds meet by what the user named (address, file, store), and by nothing else.

Workers of a pool join worlds in any order, so their histories differ; they are killed, replaced,
give up and come again. A world whose ranks all come runs right. Otherwise its ranks fail in time,
with an error that names the missing, and nothing is left in the way of the next world.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ports import free_port

import nc10d as dist
from nc10d.group.world import own_world
from nc10d.init_methods.methods import rendezvous
from nc10d.store import HashStore, TCPStore

WORKERS = 3
LONG, SHORT = 60.0, 0.4
SCRIPT = Path(__file__).with_name("worlds_worker.py")


class Worker:
    """A process that comes to worlds."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, *call: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def end(self) -> tuple[str, Any]:
        assert self.process.stdout is not None
        kind, told = json.loads(self.process.stdout.readline())
        return kind, told

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def pool() -> Iterator[list[Worker]]:
    workers = [Worker() for _ in range(WORKERS)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            probe.listen()
            return True
        return False


@dataclass(frozen=True)
class Job:
    """A world at a place; `order` has its ranks as they come, `workers` theirs by rank.

    Before a rank of `troubles` comes to stay, it comes and is "killed", or gives up and comes
    again ("late"); not the last in order. With `absent`, the last in order never comes.
    """

    place: int
    order: tuple[int, ...]
    workers: tuple[int, ...]
    troubles: dict[int, str]
    absent: bool


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    size = draw(st.integers(1, WORKERS))
    order = tuple(draw(st.permutations(range(size))))
    workers = tuple(draw(st.permutations(range(WORKERS)))[:size])
    trouble = st.sampled_from(["killed", "late", "", "", ""])
    troubles = {rank: kind for rank in order if (kind := draw(trouble))}
    absent = size > 1 and draw(st.integers(0, 3)) == 0
    return Job(draw(st.integers(0, 1)), order, workers, troubles, absent)


def play(job: Job, workers: list[Worker], method: str) -> None:
    """Let the job's ranks come, with its troubles, and check how they end."""
    host = job.workers[0] if job.order[0] == 0 else None  # it leaves its world as it comes to this
    for other in set(range(WORKERS)) - {host}:
        workers[other].begin("leave")  # a rank 0 keeps its port as long as it is in its world
        assert workers[other].end() == ("met", [])
    size, limit = len(job.order), SHORT if job.absent else LONG
    coming = job.order[: size - job.absent]
    for rank in coming:
        place = job.workers[rank]
        trouble = job.troubles.get(rank) if rank != job.order[-1] else None
        if trouble == "killed":
            workers[place].begin("meet", method, rank, size, LONG)
            workers[place].kill()
            workers[place] = Worker()
        elif trouble == "late":
            workers[place].begin("meet", method, rank, size, SHORT / 4)
            assert workers[place].end()[0] != "met"
        workers[place].begin("meet", method, rank, size, limit)
    ends = [workers[job.workers[rank]].end() for rank in coming]
    if job.absent:
        known = "RendezvousError", "StoreTimeout", "ConnectTimeout"
        assert all(kind in known for kind, _ in ends), ends
        missing = rf": .*\b{job.order[-1]}\b"
        named = [told for kind, told in ends if kind == "RendezvousError"]
        assert all(re.search(missing, told) for told in named), ends
    else:
        everybody = [f"rank {rank} of {size}" for rank in range(size)]
        assert ends == [("met", everybody)] * size


@pytest.mark.slow
@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(kind=st.sampled_from(["tcp", "file"]), history=st.lists(jobs(), min_size=2, max_size=6))
def test_every_world_meets_or_names_the_missing_whatever_came_before(
    kind: str, history: Sequence[Job]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pool() as workers:
        ports = [free_port() for _ in range(2)]
        for job in history:
            files = f"file://{folder}/{job.place}"
            play(job, workers, files if kind == "file" else f"tcp://127.0.0.1:{ports[job.place]}")
        for worker in workers:
            worker.begin("leave")
            worker.end()
        assert all(is_free(port) for port in ports)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_workers_of_a_pool_communicate_in_one_world_after_the_other(
    kind: str, tmp_path: Path
) -> None:
    method = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/store"
    with pool() as workers:
        for members in ([0], [0, 1], [1, 2], [0, 1, 2], [2, 0]):
            for other in set(range(WORKERS)) - set(members):
                workers[other].begin("leave")
                workers[other].end()
            for rank, member in enumerate(members):
                workers[member].begin("init", method, rank, len(members), LONG)
            ends = [workers[member].end() for member in members]
            assert ends == [("met", [f"{float(len(members))}"])] * len(members)
            if members == [1, 2]:  # while it is in a world
                workers[2].kill()
                workers[2] = Worker()


def test_a_store_serves_worlds_of_ranks_with_different_histories() -> None:
    with own_world():
        dist.init_process_group("cpu", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        with contextlib.closing(TCPStore("127.0.0.1", is_master=True, timeout=LONG)) as store:
            for _ in range(2):
                dist.init_process_group("cpu", store=store, rank=0, world_size=1, timeout=LONG)
                dist.destroy_process_group()


def test_the_port_is_free_when_the_host_has_left_and_others_have_not() -> None:
    port = free_port()
    with pool() as workers:
        workers[0].begin("meet", f"tcp://127.0.0.1:{port}", 1, 2, LONG)
        store, _, _ = rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, LONG)
        store.set("value/0", "")
        assert workers[0].end()[0] == "met"  # and stays
        assert not is_free(port)
        store.close()
        assert is_free(port)
