"""Jobs whose ranks are on hosts of their own: network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from nc10d.auth import VALUE, new_token
from nc10d.bench.plain import PLAIN
from nc10d.bench.starters import Rows
from nc10d.testing.networks import DEVICE, Network

PORT = "29500"


def words_of(net: Network, library: str) -> list[str]:
    """Return the module that measures a library, and its first arguments."""
    if library.startswith(PLAIN):
        addresses = [net.address(host) for host in range(len(net.names))]
        return ["nc10d.bench.plain", library, json.dumps(addresses)]
    return ["nc10d.bench.peers", library]


def run_apart(net: Network, mates: int, words: Sequence[str], limit: float) -> Rows:
    """Run a module with arguments on `mates` ranks of each host; return the rows of rank 0.

    The file to write them to is given as the last argument. Blocks until the job ends, at most
    `limit` seconds; RuntimeError with a rank's last words if one fails.
    """
    python = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        ranks = [
            subprocess.Popen(
                [*net.inside(rank // mates), *python, *words, str(out)],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **dict(_variables(net, mates, rank, token))},
            )
            for token in [new_token()]
            for rank in range(mates * len(net.names))
        ]
        try:
            for rank in ranks:
                _, told = rank.communicate(timeout=limit)
                if rank.returncode:
                    raise RuntimeError(f"{words[0]}: {told[-1500:]}")
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        rows: Rows = json.loads(out.read_text())
        return rows


def _variables(net: Network, mates: int, rank: int, token: str) -> Iterator[tuple[str, str]]:
    """Yield what torchrun would tell a rank, and each library's name of the device."""
    yield from (("RANK", str(rank)), ("WORLD_SIZE", str(mates * len(net.names))))
    yield from (("LOCAL_RANK", str(rank % mates)), ("LOCAL_WORLD_SIZE", str(mates)))
    yield from (("MASTER_ADDR", net.address(0)), ("MASTER_PORT", PORT))
    yield from (("NC10D_SOCKET_IFNAME", DEVICE), ("GLOO_SOCKET_IFNAME", DEVICE), (VALUE, token))
