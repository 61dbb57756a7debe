"""Scenarios of faults: how groups and processes end, and what stays behind."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from nc10d.debug.cells import LIMIT, Cell, counted, numbers, told
from nc10d.debug.libraries import Library
from nc10d.debug.stage import Report, Stage

_BEGUN = 0


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
    """Return what a forked child is told when it makes a call; "silence" after a second."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        kind = told(library, partial(library.call, 0, 1), 0.0)["kind"]
        os.write(write, kind.encode())
        os._exit(0)
    os.close(write)
    threading.Timer(1.0, partial(_end, child)).start()
    with os.fdopen(read) as said:
        kind = said.read()
    _, status = os.waitpid(child, 0)
    signalled = os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL
    return kind or (f"signal {os.WTERMSIG(status)}" if signalled else "silence")


def _end(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def cycles(library: Library, count: int) -> Cell:
    """Make and end groups one after the other in the same processes; count what has grown."""
    played = Stage(2).play(partial(_cycle, library, count), 2, LIMIT + count)
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
    return {what: number - before[what] for what, number in _held().items()}


def _held() -> dict[str, int]:
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum(" rw-s " in line for line in mapped),
    }


def all_killed(library: Library, count: int) -> Cell:
    """Kill all ranks in the midst of their calls; look for what they leave in file systems."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir()), Path.cwd()]
    before = {path for folder in folders for path in folder.iterdir()}
    for _ in range(count):
        Stage(4).play(partial(_go_on, library, next(numbers)), 4, LIMIT)
    after = {path for folder in folders for path in folder.iterdir()} - before
    left = [path for path in after if path.exists() and path.stat().st_uid == os.getuid()]
    return Cell((), f"{count} times: {len(left) or 'no'} files left")


def _go_on(library: Library, number: int, stage: Stage, rank: int) -> Report:
    library.join(number, rank, stage.size, LIMIT)
    delay = 0.001 * ((7 * number + 3 * rank) % 30)
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        try:
            library.call(0, 5000)
        except Exception:  # noqa: BLE001  (the others are being killed; so is this rank)
            signal.pause()
