"""A scenario of faults that needs hosts of its own: the network of one of them is lost.

Hosts are network namespaces with a wire between them, which only root can make.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from functools import partial

from benchmarks.faults.cells import LIMIT, Cell, numbers, told
from benchmarks.faults.libraries import Library
from benchmarks.faults.stage import Report, Stage
from nc10d.errors import UnsupportedPlatform
from nc10d.testing.networks import DEVICE, ip, network

HOSTS = 2
_CUT = 0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <linux/sched.h>


def cut_off(library: Library, count: int) -> Cell:
    """Cut the wire between two hosts in the midst of calls."""
    late, named = [], 0
    try:
        for _ in range(count):
            with network(HOSTS) as net:
                stage = Stage(HOSTS)
                part = partial(_go_on, library, next(numbers), net.names)
                for report in stage.play(part, HOSTS, 2 * LIMIT).reports:
                    late.append(report["end"] - stage.noted(_CUT))
                    named += report["failed"] == 1 - report["rank"]
    except UnsupportedPlatform as error:
        return Cell((), f"not played: {error}")
    return Cell(tuple(late), f"{named} of {HOSTS * count} are told who")


def _go_on(library: Library, number: int, names: list[str], stage: Stage, rank: int) -> Report:
    library.join(number, rank, stage.size, LIMIT, partial(_enter, names[rank]))
    library.call(0, 1)
    if rank == 1:
        threading.Timer(0.1, _cut, (stage,)).start()

    def go_on() -> None:
        while True:
            library.call(0, 1000)

    return {**told(library, go_on, 0.0), "end": time.monotonic()}


def _cut(stage: Stage) -> None:
    ip("link", "set", DEVICE, "down")
    stage.note(_CUT, time.monotonic())


def _enter(name: str) -> None:
    """Move to a host: this thread, and what it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    os.environ["NC10D_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    os.environ["NC10D_INSECURE"] = "1"  # nobody else reaches that network
