"""A scenario of faults that needs hosts of its own: the network of one of them is lost.

Hosts are network namespaces with a wire between them, which only root can make.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial

from nc10d.debug.cells import LIMIT, Cell, numbers, told
from nc10d.debug.libraries import Library
from nc10d.debug.stage import Report, Stage
from nc10d.errors import UnsupportedPlatform

HOSTS = 2
_DEVICE = "nc10d0"
_CUT = 0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <linux/sched.h>
_nets = itertools.count()


def cut_off(library: Library, count: int) -> Cell:
    """Cut the wire between two hosts in the midst of calls."""
    late, named = [], 0
    try:
        with _hosts() as names:
            for _ in range(count):
                _wire(names)
                stage = Stage(HOSTS)
                part = partial(_go_on, library, next(numbers), names)
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
    _ip("link", "set", _DEVICE, "down")
    stage.note(_CUT, time.monotonic())


def _enter(name: str) -> None:
    """Move to a host: this thread, and what it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    os.environ["NC10D_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = _DEVICE
    os.environ["NC10D_INSECURE"] = "1"  # nobody else reaches that network


@contextlib.contextmanager
def _hosts() -> Iterator[list[str]]:
    """Make hosts without a wire; UnsupportedPlatform where that can't be done."""
    if shutil.which("ip") is None:
        raise UnsupportedPlatform("network namespaces need ip (iproute2)")
    number = next(_nets)
    names = [f"nc10d-faults-{os.getpid()}-{number}-{host}" for host in range(HOSTS)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _wire(names: list[str]) -> None:
    """Connect the hosts anew."""
    one, other = names
    subprocess.run(["ip", "-n", one, "link", "delete", _DEVICE], capture_output=True, check=False)
    wire = ["type", "veth", "peer", "name", _DEVICE, "netns", other]
    _ip("-n", one, "link", "add", _DEVICE, *wire)
    for host, name in enumerate(names):
        _ip("-n", name, "addr", "add", f"10.88.0.{host + 1}/24", "dev", _DEVICE)
        _ip("-n", name, "link", "set", _DEVICE, "up")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"network namespaces can't be made here: {done.stderr.strip()}"
        raise UnsupportedPlatform(message)
