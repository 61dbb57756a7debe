"""Jobs whose ranks are on separate hosts, and exchange lines with the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nc10d.auth.token import VALUE, new_token
from nc10d.testing.hosts.namespaces import Network

PORT = 29500
TOKEN = new_token()  # these hosts have addresses that other hosts can reach

PRELUDE = """
import os, sys, time
import numpy as np
import nc10d as dist
from nc10d.store import TCPStore

rank, size, server = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def join(timeout=30.0):
    store = TCPStore(server, 29500, size, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("cpu", store=store, rank=rank, world_size=size, timeout=timeout)
    return dist.GroupMember.WORLD


def say(*words):
    print(*words, flush=True)


def hear():
    return sys.stdin.readline().strip()

"""


@dataclass
class Rank:
    """A process in a namespace: it reads and prints lines."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(self.process.stderr.read()[-3000:])
        return line

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def job(
    net: Network, code: str, hosts: Sequence[int], family: int = 4, **variables: str
) -> Iterator[list[Rank]]:
    """Run the same code on ranks, each in the namespace of its host."""
    server = net.address(hosts[0], family)
    ranks = []
    for rank, host in enumerate(hosts):
        words = [sys.executable, "-c", PRELUDE + code, str(rank), str(len(hosts)), server]
        ranks.append(Rank(_run([*net.inside(host), *words], variables)))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.communicate()


def _run(words: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, VALUE: TOKEN, **variables},
    )
