"""Kill -9 of a rank at a random moment of random collectives, again and again: what survivors say.

`python -m nc10d.debug.kills COUNT SIZE` prints a line of JSON for each kill. One process that has
loaded everything forks the ranks of each round, so a round takes a fraction of a second. The
victim kills itself from a thread of its own; times are those of the system's monotonic clock,
which all processes share.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

LATEST = 0.03
"""Seconds of traffic before the victim dies, at most."""
HANG = 60.0
"""Seconds after which a survivor that says nothing counts as one that hangs."""
HOLD = 3**600_000
"""A number whose multiplication holds the GIL for about a tenth of a second."""
_TIME = struct.Struct("d")


class Library(Protocol):
    """What a round needs of nc10d or of another library."""

    def warm(self) -> None:
        """Load everything, in the process that forks the ranks."""

    def join(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Make the default group of round `number`."""

    def call(self, kind: int, count: int) -> None:
        """Make one of a few collectives on `count` elements."""

    def told(self, error: BaseException) -> dict[str, Any]:
        """Return what an error says, by attribute."""

    def leave(self) -> None:
        """Destroy the group."""


@dataclass(frozen=True, slots=True)
class Round:
    """One kill: who of how many, when, and what else goes on."""

    number: int
    size: int
    victim: int
    delay: float
    seed: int
    forked: bool  # ranks have children that hold their descriptors
    holder: int | None  # this rank holds the GIL now and then


def rounds(count: int, size: int, seed: int) -> Iterator[Round]:
    """Draw `count` rounds; all that is random about them follows from `seed`."""
    chance = random.Random(seed)
    for number in range(count):
        victim = chance.randrange(size)
        others = [rank for rank in range(size) if rank != victim]
        yield Round(
            number=number,
            size=size,
            victim=victim,
            delay=chance.random() * LATEST,
            seed=chance.randrange(1 << 30),
            forked=chance.random() < 0.3,
            holder=chance.choice(others) if chance.random() < 0.3 else None,
        )


class Blackboard:
    """When the victim died, and who has forked whom, where a dead rank's word can still be read."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, _TIME.size * (size + 1))

    def note(self, slot: int, value: float) -> None:
        """Write a number into a slot: 0 is the time of death, 1 + rank a rank's child."""
        _TIME.pack_into(self._memory, _TIME.size * slot, value)

    def read(self, slot: int) -> float:
        """Return what was noted; 0 for nothing."""
        return float(_TIME.unpack_from(self._memory, _TIME.size * slot)[0])


def play(one: Round, library: Library) -> dict[str, Any]:
    """Play one round in processes forked from this one; return what the survivors reported."""
    board = Blackboard(one.size)
    read, write = os.pipe()
    body = partial(_rank, one, library, board, write)
    pids = [_fork(partial(body, rank)) for rank in range(one.size)]
    os.close(write)
    try:
        text = _all_of(read, time.monotonic() + HANG)
    finally:
        os.close(read)
        children = [int(board.read(1 + rank)) for rank in range(one.size)]
        for pid in [*pids, *filter(None, children)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    told = [json.loads(line) for line in text.splitlines()]
    for words in told:
        words["late"] = words["at"] - max(board.read(0), words.pop("free"))
    return {
        "victim": one.victim,
        "pid": pids[one.victim],
        "size": one.size,
        "forked": one.forked,
        "holder": one.holder,
        "codes": codes,
        "told": told,
    }


def _fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
    except BaseException as error:  # noqa: BLE001  (this process ends here, whatever happens)
        print(f"a rank ended by {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _all_of(descriptor: int, until: float) -> str:
    """Read until nobody writes any more, or until the time is up."""
    parts = []
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while poller.poll(max(0.0, until - time.monotonic()) * 1000):
        data = os.read(descriptor, 1 << 16)
        if not data:
            break
        parts.append(data)
    return b"".join(parts).decode()


def _rank(one: Round, library: Library, board: Blackboard, write: int, rank: int) -> None:
    library.join(one.number, rank, one.size, timeout=HANG)
    if one.forked:
        board.note(1 + rank, _fork(partial(_stay, write)))
    library.call(0, 1)
    if rank == one.victim:
        threading.Timer(one.delay, _die, (board,)).start()
    chance, own, free = random.Random(one.seed), random.Random(rank), 0.0
    try:
        while True:
            library.call(chance.randrange(4), chance.choice((1, 100, 5_000, 100_000)))
            if rank == one.holder and own.random() < 0.05:
                HOLD * HOLD
                free = time.monotonic()
    except Exception as error:  # noqa: BLE001  (whatever it is: it is what the survivor was told)
        words = {"rank": rank, "at": time.monotonic(), "free": free, **library.told(error)}
    os.write(write, json.dumps(words).encode() + b"\n")
    library.leave()


def _stay(write: int) -> None:
    """Hold on to everything that was inherited, except the way to the reader."""
    os.close(write)
    while True:
        signal.pause()


def _die(board: Blackboard) -> None:
    board.note(0, time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


class Nc10d:
    """Rounds on nc10d's own engine, met in a store that outlives them."""

    def warm(self) -> None:
        """Compile or load what ranks run, before they are forked."""
        from nc10d.store import TCPStore
        from nc10d.testing import run_ranks

        def once(group: Any) -> None:
            import nc10d as dist

            for kind in range(4):
                _collective(dist, kind, 5_000)

        run_ranks(once, 2)
        self._server = TCPStore("127.0.0.1", 0, is_master=True)

    def join(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Make the default group of round `number`."""
        import nc10d as dist

        store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", self._server.port))
        dist.init_process_group("cpu", store=store, rank=rank, world_size=size, timeout=timeout)

    def call(self, kind: int, count: int) -> None:
        """Make one of a few collectives on `count` elements."""
        import nc10d as dist

        _collective(dist, kind, count)

    def told(self, error: BaseException) -> dict[str, Any]:
        """Return the error's type, message and attributes."""
        fields = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        return {"kind": type(error).__name__, "message": str(error), **_renamed(fields)}

    def leave(self) -> None:
        """Destroy the group."""
        import nc10d as dist

        dist.destroy_process_group()


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    # "rank" is who reports here; whom the error names is "failed".
    return {"failed" if name == "rank" else name: value for name, value in fields.items()}


def _collective(dist: Any, kind: int, count: int) -> None:
    import numpy as np

    x = np.ones(count)
    if kind == 0:
        dist.all_reduce(x)
    elif kind == 1:
        dist.broadcast(x, src=0)
    elif kind == 2:
        dist.all_gather_into_tensor(np.ones(count * dist.get_world_size()), x)
    else:
        dist.all_reduce(x, async_op=True).wait()


class Gloo:
    """The same rounds on torch.distributed with gloo."""

    def warm(self) -> None:
        """Load torch, before ranks are forked."""
        import tempfile

        import torch.distributed

        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory()

    def join(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Make the default group of round `number`."""
        from datetime import timedelta

        import torch.distributed as dist

        method = f"file://{self._folder.name}/{number}"
        limit = timedelta(seconds=min(timeout, 5.0))
        dist.init_process_group("gloo", method, limit, size, rank)

    def call(self, kind: int, count: int) -> None:
        """Make one of a few collectives on `count` elements."""
        import torch
        import torch.distributed as dist

        x = torch.ones(count)
        if kind == 0:
            dist.all_reduce(x)
        elif kind == 1:
            dist.broadcast(x, src=0)
        elif kind == 2:
            dist.all_gather([torch.ones(count) for _ in range(dist.get_world_size())], x)
        else:
            dist.all_reduce(x, async_op=True).wait()

    def told(self, error: BaseException) -> dict[str, Any]:
        """Return the error's type and message: it has no attributes."""
        return {"kind": type(error).__name__, "message": str(error)}

    def leave(self) -> None:
        """Do nothing: a group of gloo that has failed may wait for ever in its end."""


LIBRARIES: dict[str, type[Library]] = {"nc10d": Nc10d, "gloo": Gloo}


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the rounds; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nc10d.debug.kills", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", choices=LIBRARIES, default="nc10d")
    options = parser.parse_args(arguments)
    library = LIBRARIES[options.library]()
    library.warm()
    for one in rounds(options.count, options.size, options.seed):
        print(json.dumps(play(one, library)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
