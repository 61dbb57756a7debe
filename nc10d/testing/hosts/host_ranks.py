"""Ranks as processes on several hosts, which are network namespaces: `run_ranks(..., hosts=2)`."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

from nc10d.auth.token import VALUE, new_token
from nc10d.store import TCPStore
from nc10d.testing.hosts.namespaces import enter, network
from nc10d.testing.rank_workers import ProcessWorker, RankWorker, join_group
from nc10d.testing.ranks import Ranks

PORT = 29500
"""The store's port: no other program listens in a new namespace."""
_servers: list[TCPStore] = []
"""The store of a job whose rank 0 is this process; the store outlives the job's groups."""


class HostRanks(Ranks):
    """Ranks as processes, in blocks on `hosts` hosts that only the network connects.

    The first run makes the hosts: UnsupportedPlatform if this user may not make network namespaces.
    """

    def __init__(self, world_size: int, hosts: int, timeout: float = 30.0) -> None:
        super().__init__(world_size, "processes", timeout=timeout)
        if not 1 <= hosts <= world_size:
            raise ValueError(f"expected 1 to {world_size} hosts for as many ranks, got {hosts}")
        self.hosts = hosts
        self._described = f"processes on {hosts} host{'s' * (hosts > 1)}"

    def _processes(self) -> list[RankWorker]:
        self._store = stack = contextlib.ExitStack()
        net, size = stack.enter_context(network(self.hosts)), self.world_size
        names = [net.names[rank * self.hosts // size] for rank in range(size)]
        address, token = net.address(0), new_token()
        return [
            ProcessWorker(partial(_join, name, token, address, rank, size, self._options))
            for rank, name in enumerate(names)
        ]


def _join(
    namespace: str, token: str, address: str, rank: int, size: int, options: dict[str, Any]
) -> None:
    """Join the group as a process of a namespace; rank 0 has the store."""
    enter(namespace)
    os.environ[VALUE] = token  # other processes on the machine may reach the bridge
    if rank == 0 and not _servers:
        _servers.append(TCPStore(address, PORT, size, is_master=True, wait_for_workers=False))
    store = TCPStore(address, PORT, size, is_master=False, wait_for_workers=False)
    join_group(store, size, options, rank)
