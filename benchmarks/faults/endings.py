"""Scenarios of faults: how groups and processes end, and what stays behind."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.faults.cells import LIMIT, Cell, counted, numbers, told
from benchmarks.faults.libraries import Library
from benchmarks.faults.stage import Report, Stage, exit_code
from nc10d.base.deadline import Deadline

_SILENT = 10.0
"""Seconds after which a forked child that has said nothing is silent."""
_STAYS = 10.0
"""Seconds after which what an ended group has held counts as kept: some of it ends by itself."""
_SHARED = Path("/dev/shm")
_MIB = 1 << 20
_FIRST = 5
"""Groups before anything is counted."""


def left(library: Library, count: int) -> Cell:
    """End a group in three ways, and the process, while an operation waits for the other rank."""
    late, words = [], []
    gc.collect()
    gc.freeze()  # what this process has loaded is not the ranks' own to take down
    for turn in range(count):
        with tempfile.TemporaryFile() as said:
            part = partial(_leave, library, next(numbers), _WAYS[turn % len(_WAYS)], said.fileno())
            played = Stage(2).play(part, 1, LIMIT)
            said.seek(0)
            words.append("says something" if said.read() else f"exit code {played.codes[0]}")
        late += [played.ends[0] - report["begun"] for report in played.reports]
        late += [report["took"] for report in played.reports]
    gc.unfreeze()
    return Cell(tuple(late), counted(words))


_WAYS = ("destroyed", "dropped", "left alone")
_CODE = 3


def _leave(
    library: Library, number: int, way: str, said: int, stage: Stage, rank: int
) -> Report | None:
    library.join(number, rank, stage.size, LIMIT)
    group = library.dist.new_group()
    library.call(0, 1)
    if rank == 1:
        signal.pause()
    os.dup2(said, 1)
    os.dup2(said, 2)
    library.begin(group)
    library.begin()
    begun = time.monotonic()
    if way == "destroyed":
        library.end()
    if way == "dropped":
        library.dist.destroy_process_group(group)
        del group
        gc.collect()
    stage.report(rank, {"begun": time.monotonic(), "took": time.monotonic() - begun})
    ctypes.pythonapi.Py_Exit(_CODE)  # as sys.exit at the end of a program: finalizers run
    return None


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
    return Cell((), f"{count} cycles: {_more(played.reports)}")


def _more(reports: Sequence[Report]) -> str:
    grown = {what: max(report[what] for report in reports) for what in _held()}
    words = ", ".join(f"{number} more {what}" for what, number in grown.items() if number > 0)
    return words or "nothing stays"


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


def dropped(library: Library, count: int) -> Cell:
    """Drop groups without destroying them; count what has grown."""
    part = partial(_drop, library, count, next(numbers))
    played = Stage(2).play(part, 2, LIMIT + _STAYS + count)
    if len(played.reports) < 2:
        return Cell((), f"{count} groups: the ranks end with {counted(map(str, played.codes))}")
    more = max(report["bytes"] for report in played.reports)
    words = _more(played.reports)
    kept = "no more than 1 MiB" if more <= _MIB else f"{more / _MIB:.1f} MiB"
    return Cell((), f"{count} groups: {words}, {kept}")


def _drop(library: Library, count: int, number: int, stage: Stage, rank: int) -> Report:
    for turn in range(-_FIRST, count):
        if turn == 0:  # what is made once for a process is there by then
            gc.collect()
            before, memory = _held(), _resident()
        library.drop(number * 1000 + _FIRST + turn, rank, stage.size, LIMIT)
    gc.collect()
    return {**_grown(before), "bytes": _resident() - memory}


def _resident() -> int:
    """Return the bytes of memory that this process holds, but what malloc keeps free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
