"""Whatever a rank waits in: Ctrl-C ends it, a peer's death or silence is told, in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from jobs import Job

from nc10d.backend.cpu.channel import Waiting
from nc10d.backend.cpu.native import layout as at
from nc10d.errors import PeerLost
from nc10d.testing.ranks import Ranks

PROMPT = 0.5
"""Seconds after Ctrl-C by which a call must have ended; a wait's slice is a tenth of that."""

INTERRUPTED = """
group = join()
peer = 1 - rank
group.all_reduce(np.ones(4))  # known from now on: the quick way
group.all_reduce(np.ones(500_000))
work = group.all_reduce(np.ones(2), async_op=True)
work.wait()
x, known = np.ones(4), np.ones(4)
if rank == 0:
    group.send(known, 1)
else:
    group.recv(known, 0)


def coalesced(later):
    with dist.coalescing_manager(group, async_ops=later) as block:
        group.all_reduce(np.ones(4))
        group.broadcast(np.ones(4), 1)
    block.wait()


def sends():
    for _ in range(3):  # two may be on their way before anybody receives
        group.send(np.ones(100_000), peer)


def quick_sends():
    while True:
        group.send(known, peer)


CALLS = {
    "all_reduce": lambda: group.all_reduce(x),
    "large": lambda: group.all_reduce(np.ones(500_000)),
    "new": lambda: group.all_gather_into_tensor(np.ones(8), np.ones(4)),
    "barrier": lambda: group.barrier(),
    "wait": lambda: group.all_reduce(x, async_op=True).wait(),
    "wait with a timeout": lambda: group.all_reduce(x, async_op=True).wait(20.0),
    "future": lambda: group.all_reduce(x, async_op=True).get_future().wait(),
    "recv": lambda: group.recv(np.ones(7), peer),
    "recv again": lambda: group.recv(known, peer),
    "recv from anyone": lambda: group.recv(x, None),
    "irecv": lambda: group.irecv(x, peer, tag=3).wait(),
    "send": sends,
    "send again": quick_sends,
    "coalesced": lambda: coalesced(False),
    "coalesced later": lambda: coalesced(True),
}
name = hear()
soon = hear() == "soon"
try:
    if rank == 1:
        say("ready")
        hear()
        group.barrier()  # learns there why
    elif soon:
        # Before the first slice is over, and in the middle of Python code around it.
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        say("ready")
        CALLS[name]()
    else:
        say("ready")
        CALLS[name]()
    say("nothing")
except KeyboardInterrupt:
    say("KeyboardInterrupt", time.monotonic())
    try:
        group.barrier()
        say("went on")
    except dist.DistError as error:
        say(type(error).__name__)
    hear()
    begun = time.monotonic()
    dist.destroy_process_group()
    say(time.monotonic() - begun)
except dist.DistError as error:
    say(type(error).__name__, str(error).split(";")[0])
"""

CALLS = [
    "all_reduce",
    "large",
    "new",
    "barrier",
    "wait",
    "wait with a timeout",
    "future",
    "recv",
    "recv again",
    "recv from anyone",
    "irecv",
    "send",
    "send again",
    "coalesced",
    "coalesced later",
]
