"""A fault scenario on separate hosts: a host loses its network.

Hosts are network namespaces with a virtual link between them, which only root can make.
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial

from benchmarks.faults.forked_ranks import ForkedRanks, Report
from benchmarks.faults.results import LIMIT, Result, numbers, outcome_of
from benchmarks.libraries.c10d import C10dLibrary
from nc10d.errors import UnsupportedPlatform
from nc10d.testing.hosts.namespaces import DEVICE, enter, ip, network

HOSTS = 2
_CUT = 0


def cut_off(library: C10dLibrary, count: int) -> Result:
    """Take down the link between two hosts amid calls."""
    late, named = [], 0
    try:
        for _ in range(count):
            with network(HOSTS) as net:
                ranks = ForkedRanks(HOSTS)
                part = partial(_go_on, library, next(numbers), net.names)
                for report in ranks.play(part, HOSTS, 2 * LIMIT).reports:
                    late.append(report["end"] - ranks.noted(_CUT))
                    named += report["failed"] == 1 - report["rank"]
    except UnsupportedPlatform as error:
        return Result((), f"not played: {error}")
    return Result(tuple(late), f"{named} of {HOSTS * count} name the lost rank")


def _go_on(
    library: C10dLibrary, number: int, names: list[str], ranks: ForkedRanks, rank: int
) -> Report:
    library.join(number, rank, ranks.size, LIMIT, partial(_enter, names[rank]))
    library.call(0, 1)
    if rank == 1:
        threading.Timer(0.1, _cut, (ranks,)).start()

    def go_on() -> None:
        while True:
            library.call(0, 1000)

    return {**outcome_of(library, go_on, 0.0), "end": time.monotonic()}


def _cut(ranks: ForkedRanks) -> None:
    ip("link", "set", DEVICE, "down")
    ranks.note(_CUT, time.monotonic())


def _enter(name: str) -> None:
    """Move this thread to a host, and let libraries use its network."""
    enter(name)
    os.environ["NC10D_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    os.environ["NC10D_INSECURE"] = "1"  # no other process reaches that network
