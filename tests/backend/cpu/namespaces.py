"""Hosts on one machine: network namespaces that a bridge in a namespace of its own connects."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nc10d.auth import VALUE, new_token

PORT = 29500
TOKEN = new_token()  # these hosts meet at addresses that others can reach
DEVICE = "eth0"
_networks = itertools.count()

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


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def why_not() -> str | None:
    """Say why namespaces can't be made here, or None."""
    if shutil.which("ip") is None:
        return "network namespaces need ip (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"nc10d-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
    except subprocess.CalledProcessError as error:
        return f"network namespaces can't be made here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return None


@dataclass
class Rank:
    """One process in a namespace: it is told and says lines."""

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


@dataclass
class Net:
    """Hosts by number, each with an address of either family on its only device."""

    names: list[str]

    def address(self, host: int, family: int = 4) -> str:
        return f"10.87.0.{host + 1}" if family == 4 else f"fd87::{host + 1}"

    def sent(self, host: int) -> int:
        """Return the bytes that a host has sent."""
        (found,) = json.loads(ip("-n", self.names[host], "-s", "-j", "link", "show", DEVICE))
        return int(found["stats64"]["tx"]["bytes"])

    def cut(self, host: int) -> None:
        """Let a host vanish: nothing comes from it, nothing reaches it."""
        ip("-n", self.names[host], "link", "set", DEVICE, "down")

    @contextlib.contextmanager
    def job(
        self, code: str, hosts: Sequence[int], family: int = 4, **variables: str
    ) -> Iterator[list[Rank]]:
        """Run the same code on ranks, each in the namespace of its host."""
        server = self.address(hosts[0], family)
        ranks = []
        for rank, host in enumerate(hosts):
            words = [sys.executable, "-c", PRELUDE + code, str(rank), str(len(hosts)), server]
            ranks.append(Rank(_run(self.names[host], words, variables)))
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.communicate()


def _run(name: str, words: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *words],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, VALUE: TOKEN, **variables},
    )


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Net]:
    """Make namespaces for hosts and connect them."""
    number = next(_networks)
    switch = f"nc10d-{os.getpid()}-{number}-switch"
    net = Net([f"nc10d-{os.getpid()}-{number}-{host}" for host in range(hosts)])
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(net.names):
            _connect(net, switch, host, name)
        yield net
    finally:
        for name in [*net.names, switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _connect(net: Net, switch: str, host: int, name: str) -> None:
    ip("netns", "add", name)
    peer = ["peer", "name", f"port{host}", "netns", switch]
    ip("link", "add", DEVICE, "netns", name, "type", "veth", *peer)
    ip("-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
    ip("-n", name, "addr", "add", f"{net.address(host)}/24", "dev", DEVICE)
    ip("-n", name, "addr", "add", f"{net.address(host, 6)}/64", "dev", DEVICE, "nodad")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "set", DEVICE, "up")
