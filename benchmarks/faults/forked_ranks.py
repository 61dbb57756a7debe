"""Forks ranks from a process that has loaded everything, and collects their reports.

A part is a function of a ForkedRanks and a rank number. It returns its report, a dictionary. A part
may die, be stopped, or never return: `play` waits for the expected reports up to a limit, and then
kills the remaining ranks. Times are those of the system's monotonic clock, which all processes
share.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Report = dict[str, Any]
Part = Callable[["ForkedRanks", int], "Report | None"]
_NUMBER = struct.Struct("d")


@dataclass(frozen=True, slots=True)
class Played:
    """Processes, their exit codes and ends, by rank; and the reports in order of arrival."""

    pids: list[int]
    codes: list[int]
    ends: list[float]
    reports: list[Report]


class ForkedRanks:
    """`size` ranks of a single run; a slot of shared memory survives its writer."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots = mmap.mmap(-1, _NUMBER.size * (2 * size + 1))
        self._read = self._write = -1

    def note(self, slot: int, value: float) -> None:
        """Write a number into a slot, 0 to `size`; further slots are internal."""
        _NUMBER.pack_into(self._slots, _NUMBER.size * slot, value)

    def noted(self, slot: int) -> float:
        """Return a slot's number; 0 before the first note."""
        return float(_NUMBER.unpack_from(self._slots, _NUMBER.size * slot)[0])

    def fork(self, rank: int, body: Callable[[], object]) -> None:
        """Start a child of this rank, with all its descriptors; it is killed with the others."""
        self.note(1 + self.size + rank, _fork(body))

    def play(self, part: Part, expected: int, limit: float) -> Played:
        """Let every rank play `part`; blocks for `expected` reports, at most `limit` seconds."""
        self._read, self._write = os.pipe()
        pids = [_fork(partial(self._perform, part, rank)) for rank in range(self.size)]
        os.close(self._write)
        lines: list[str] = []
        try:
            lines = _lines(self._read, expected, time.monotonic() + limit)
        finally:
            os.close(self._read)
            ended = self._end(pids, {json.loads(line)["rank"] for line in lines})
        codes, ends = [code for code, _ in ended], [at for _, at in ended]
        return Played(pids, codes, ends, [json.loads(line) for line in lines])

    def report(self, rank: int, report: Report) -> None:
        """Send a report from a rank whose part can't return it."""
        os.write(self._write, json.dumps({"rank": rank, **report}).encode() + b"\n")

    def _perform(self, part: Part, rank: int) -> None:
        report = part(self, rank)
        if report is not None:
            self.report(rank, report)

    def _end(self, pids: list[int], reported: set[int]) -> list[tuple[int, float]]:
        """Return exit codes and times; ranks that have reported get a while to exit."""
        now = time.monotonic()
        limits = (now + (5.0 if rank in reported else 0.1) for rank in range(self.size))
        ended = [
            (exit_code(pid, until), time.monotonic())
            for pid, until in zip(pids, limits, strict=True)
        ]
        children = [int(self.noted(slot)) for slot in range(self.size + 1, 2 * self.size + 1)]
        for child in filter(None, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return ended


def exit_code(pid: int, until: float) -> int:
    """Return a child's exit code, or minus its signal; kill it if it still runs at `until`."""
    poller = select.poll()
    pidfd = os.pidfd_open(pid)
    try:
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(body: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
    except BaseException as error:  # noqa: BLE001  (this process ends here in any case)
        print(f"a rank ended by {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _lines(descriptor: int, expected: int, until: float) -> list[str]:
    """Read until `expected` lines are there, all writers are gone, or the time is up."""
    text = b""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while text.count(b"\n") < expected:
        if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
            break
        data = os.read(descriptor, 1 << 16)
        if not data:
            break
        text += data
    return text.decode().splitlines()
