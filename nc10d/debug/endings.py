"""Scenarios of faults: how groups and processes end, and what stays behind."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from nc10d.deadline import Deadline
from nc10d.debug.cells import LIMIT, Cell, counted, numbers, told
from nc10d.debug.libraries import Library
from nc10d.debug.stage import Report, Stage, exit_code

_SILENT = 10.0
"""Seconds after which a forked child that has said nothing is silent."""
_STAYS = 10.0
"""Seconds after which what an ended group has held counts as kept: some of it ends by itself."""
_SHARED = Path("/dev/shm")


def left(library: Library, count: int) -> Cell:
    """End a group, and the process, while an operation waits for the other rank."""
    late, codes = [], []
    for _ in range(count):
        played = Stage(2).play(partial(_leave, library, next(numbers)), 1, LIMIT)
        late += [report["late"] for report in played.reports]
        codes.append(f"exit code {played.codes[0]}" if played.reports else "hung")
    return Cell(tuple(late), counted(codes))


def _leave(library: Library, number: int, stage: Stage, rank: int) -> Report | None:
    library.join(number, rank, stage.size, LIMIT)
    library.call(0, 1)
    if rank == 1:
        signal.pause()
    library.begin()
    begun = time.monotonic()
    library.end()
    return {"late": time.monotonic() - begun}


def forked(library: Library, count: int) -> Cell:
    """Use the group in a forked child; the parent goes on with it."""
    words = []
    for _ in range(count):
        played = Stage(2).play(partial(_fork, library, next(numbers)), 2, LIMIT)
        children = [report["child"] for report in played.reports if report["rank"] == 0]
        words += [f"{child} in the child" for child in children or ["hung"]]
        words += ["the parents go on" if len(played.reports) == 2 else "the parents don't go on"]
    return Cell((), counted(words))


def _fork(library: Library, number: int, stage: Stage, rank: int) -> Report:
    library.join(number, rank, stage.size, LIMIT)
    library.call(0, 1)
    child = _in_child(library) if rank == 0 else ""
    library.call(0, 1)
    library.leave()
    return {"child": child}


def _in_child(library: Library) -> str:
    """Return what a forked child is told when it makes a call; "silence" if that is nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        kind = told(library, partial(library.call, 0, 1), 0.0)["kind"]
        os.write(write, kind.encode())
        os._exit(0)
    os.close(write)
    code = exit_code(child, time.monotonic() + _SILENT)
    with os.fdopen(read) as said:
        kind = said.read()
    signalled = code < 0 and code != -signal.SIGKILL
    return kind or (f"signal {-code}" if signalled else "silence")


def cycles(library: Library, count: int) -> Cell:
    """Make and end groups one after the other in the same processes; count what has grown."""
    played = Stage(2).play(partial(_cycle, library, count), 2, LIMIT + _STAYS + count)
    grown = {what: max(report[what] for report in played.reports) for what in _held()}
    words = ", ".join(f"{number} more {what}" for what, number in grown.items() if number > 0)
    return Cell((), f"{count} cycles: {words or 'nothing stays'}")


def _cycle(library: Library, count: int, stage: Stage, rank: int) -> Report:
    before = _held()
    for turn in range(count + 2):
        if turn == 2:  # what is made once for a process is there by then
            before = _held()
        library.join(5_000_000 + turn, rank, stage.size, LIMIT)
        library.call(0, 1000)
        library.end()
    gc.collect()
    return _grown(before)


def _grown(before: dict[str, int]) -> Report:
    """Return how much more is held than `before`; blocks until that is nothing, or it stays."""
    until = Deadline.after(_STAYS)
    while True:
        grown = {what: number - before[what] for what, number in _held().items()}
        if max(grown.values()) <= 0 or until.expired():
            return grown
        time.sleep(0.01)  # nothing tells that a thread or a mapping is gone


def _held() -> dict[str, int]:
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum(" rw-s " in line for line in mapped),
    }


def all_killed(library: Library, count: int) -> Cell:
    """Kill all ranks in the midst of their calls; look for what they leave in file systems."""
    before = {*_shared(library)}
    with tempfile.TemporaryDirectory() as own:
        for _ in range(count):
            Stage(4).play(partial(_go_on, library, next(numbers), own), 4, LIMIT)
        left = {*_shared(library), *Path(own).iterdir()} - before
    return Cell((), f"{count} times: {len(left) or 'no'} files left")


def _shared(library: Library) -> Iterator[Path]:
    """Give the library's files in the shared place: those of other programs come and go there."""
    return (path for path in _SHARED.iterdir() if library.name in path.name)


def _go_on(library: Library, number: int, own: str, stage: Stage, rank: int) -> Report:
    os.chdir(own)
    os.environ["TMPDIR"] = tempfile.tempdir = own
    library.join(number, rank, stage.size, LIMIT)
    delay = 0.001 * ((7 * number + 3 * rank) % 30)
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        try:
            library.call(0, 5000)
        except Exception:  # noqa: BLE001  (the others are being killed; so is this rank)
            signal.pause()
