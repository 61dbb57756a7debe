"""Jobs whose ranks are on separate hosts, and exchange lines with the test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from jobs import Rank

from nc10d.auth.token import VALUE, new_token
from nc10d.testing.hosts.namespaces import Network

PORT = 29500
TOKEN = new_token()  # these hosts have addresses that other hosts can reach


@contextlib.contextmanager
def job(
    net: Network, code: str, hosts: Sequence[int], family: int = 4, **variables: str
) -> Iterator[list[Rank]]:
    """Run the same code on ranks, each in the namespace of its host."""
    server, env = net.address(hosts[0], family), {**os.environ, VALUE: TOKEN, **variables}
    places = [(rank, len(hosts), PORT) for rank in range(len(hosts))]
    ranks = [
        Rank(code, place, server, inside=net.inside(host), env=env)
        for place, host in zip(places, hosts, strict=True)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()
