"""Fault scenarios: groups and processes end, and may leave resources behind."""

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

from benchmarks.faults.forked_ranks import ForkedRanks, Report, exit_code
from benchmarks.faults.results import LIMIT, Result, counted, numbers, outcome_of
from benchmarks.libraries.c10d import C10dLibrary
from nc10d.base.deadline import Deadline

_SILENT = 10.0
"""Seconds after which a forked child without a report counts as silent."""
_STAYS = 10.0
"""Seconds after which a resource of an ended group counts as leaked: some are freed later."""
_SHARED = Path("/dev/shm")
_MIB = 1 << 20
_FIRST = 5
"""Groups before anything is counted."""


def left(library: C10dLibrary, count: int) -> Result:
    """End a group in three ways, and the process, while an operation waits for the other rank."""
    late, words = [], []
    gc.collect()
    gc.freeze()  # the ranks need not free this process's objects
    for turn in range(count):
        with tempfile.TemporaryFile() as said:
            part = partial(_leave, library, next(numbers), _WAYS[turn % len(_WAYS)], said.fileno())
            played = ForkedRanks(2).play(part, 1, LIMIT)
            said.seek(0)
            words.append("says something" if said.read() else f"exit code {played.codes[0]}")
        late += [played.ends[0] - report["begun"] for report in played.reports]
        late += [report["took"] for report in played.reports]
    gc.unfreeze()
    return Result(tuple(late), counted(words))


_WAYS = ("destroyed", "dropped", "left alone")
_CODE = 3


def _leave(
    library: C10dLibrary, number: int, way: str, said: int, ranks: ForkedRanks, rank: int
) -> Report | None:
    library.join(number, rank, ranks.size, LIMIT)
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
    ranks.report(rank, {"begun": time.monotonic(), "took": time.monotonic() - begun})
    ctypes.pythonapi.Py_Exit(_CODE)  # as by sys.exit: finalizers run
    return None


def forked(library: C10dLibrary, count: int) -> Result:
    """Use the group in a forked child, and go on in the parent."""
    words = []
    for _ in range(count):
        played = ForkedRanks(2).play(partial(_fork, library, next(numbers)), 2, LIMIT)
        children = [report["child"] for report in played.reports if report["rank"] == 0]
        words += [f"{child} in the child" for child in children or ["hung"]]
        words += ["the parents go on" if len(played.reports) == 2 else "the parents don't go on"]
    return Result((), counted(words))


def _fork(library: C10dLibrary, number: int, ranks: ForkedRanks, rank: int) -> Report:
    library.join(number, rank, ranks.size, LIMIT)
    library.call(0, 1)
    child = end_of_child(library) if rank == 0 else ""
    library.call(0, 1)
    library.leave()
    return {"child": child}


def end_of_child(library: C10dLibrary) -> str:
    """Return the error of a call in a forked child; "silence" if it reports none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        kind = outcome_of(library, partial(library.call, 0, 1), 0.0)["kind"]
        os.write(write, kind.encode())
        os._exit(0)
    os.close(write)
    code = exit_code(child, time.monotonic() + _SILENT)
    with os.fdopen(read) as said:
        kind = said.read()
    signalled = code < 0 and code != -signal.SIGKILL
    return kind or (f"signal {-code}" if signalled else "silence")


def cycles(library: C10dLibrary, count: int) -> Result:
    """Make and end groups in the same processes; count leaked resources."""
    played = ForkedRanks(2).play(partial(_cycle, library, count), 2, LIMIT + _STAYS + count)
    return Result((), f"{count} cycles: {_more(played.reports)}")


def _more(reports: Sequence[Report]) -> str:
    grown = {name: max(report[name] for report in reports) for name in _held()}
    words = ", ".join(f"{number} more {name}" for name, number in grown.items() if number > 0)
    return words or "nothing stays"


def _cycle(library: C10dLibrary, count: int, ranks: ForkedRanks, rank: int) -> Report:
    before = _held()
    for turn in range(count + 2):
        if turn == 2:  # per-process resources exist by then
            before = _held()
        library.join(5_000_000 + turn, rank, ranks.size, LIMIT)
        library.call(0, 1000)
        library.end()
    gc.collect()
    return _grown(before)


def dropped(library: C10dLibrary, count: int) -> Result:
    """Drop groups without destroying them; count leaked resources."""
    part = partial(_drop, library, count, next(numbers))
    played = ForkedRanks(2).play(part, 2, LIMIT + _STAYS + count)
    if len(played.reports) < 2:
        return Result((), f"{count} groups: the ranks end with {counted(map(str, played.codes))}")
    more = max(report["bytes"] for report in played.reports)
    words = _more(played.reports)
    kept = "no more than 1 MiB" if more <= _MIB else f"{more / _MIB:.1f} MiB"
    return Result((), f"{count} groups: {words}, {kept}")


def _drop(library: C10dLibrary, count: int, number: int, ranks: ForkedRanks, rank: int) -> Report:
    for turn in range(-_FIRST, count):
        if turn == 0:  # per-process resources exist by then
            gc.collect()
            before, memory = _held(), _resident()
        library.drop(number * 1000 + _FIRST + turn, rank, ranks.size, LIMIT)
    gc.collect()
    return {**_grown(before), "bytes": _resident() - memory}


def _resident() -> int:
    """Return the bytes of memory that this process holds, without malloc's free ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _grown(before: dict[str, int]) -> Report:
    """Return the growth since `before`; blocks until it is zero, at most _STAYS seconds."""
    until = Deadline.after(_STAYS)
    while True:
        grown = {name: number - before[name] for name, number in _held().items()}
        if max(grown.values()) <= 0 or until.expired():
            return grown
        time.sleep(0.01)  # no event announces the end of a thread or a mapping


def _held() -> dict[str, int]:
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum(" rw-s " in line for line in mapped),
    }


def all_killed(library: C10dLibrary, count: int) -> Result:
    """Kill all ranks amid their calls; count the files that they leave."""
    before = {*_shared(library)}
    with tempfile.TemporaryDirectory() as own:
        for _ in range(count):
            ForkedRanks(4).play(partial(_go_on, library, next(numbers), own), 4, LIMIT)
        left = {*_shared(library), *Path(own).iterdir()} - before
    return Result((), f"{count} times: {len(left) or 'no'} files left")


def _shared(library: C10dLibrary) -> Iterator[Path]:
    """Return the library's files in the shared folder, which other programs use too."""
    return (path for path in _SHARED.iterdir() if library.name in path.name)


def _go_on(library: C10dLibrary, number: int, own: str, ranks: ForkedRanks, rank: int) -> Report:
    os.chdir(own)
    os.environ["TMPDIR"] = tempfile.tempdir = own
    library.join(number, rank, ranks.size, LIMIT)
    delay = 0.001 * ((7 * number + 3 * rank) % 30)
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        try:
            library.call(0, 5000)
        except Exception:  # noqa: BLE001  (all ranks are being killed, this rank too)
            signal.pause()
