"""Ranks as processes that may be killed, stopped, interrupted, or end as they like."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from nc10d.store import TCPStore

PRELUDE = """
import contextlib, gc, os, signal, sys, threading, time
import numpy as np
import nc10d as dist
from nc10d.store import TCPStore

rank, size, port = map(int, sys.argv[1:4])
server, serves = (*sys.argv[4:], "127.0.0.1")[0], rank == 0 and len(sys.argv) > 4


def join(timeout=30.0):
    store = TCPStore(server, port, size, is_master=serves, wait_for_workers=False)
    dist.init_process_group("cpu", store=store, rank=rank, world_size=size, timeout=timeout)
    return dist.GroupMember.WORLD


def say(*words):
    print(*words, flush=True)


def hear():
    return sys.stdin.readline().strip()

"""


PRIVATE_FUTEX = 128  # FUTEX_PRIVATE_FLAG of linux/futex.h


class Rank:
    """A process: its output is read line by line, and its input is written line by line.

    With a `server`, rank 0 serves the store at that address.
    """

    def __init__(
        self,
        code: str,
        place: tuple[int, int, int],
        *server: str,
        inside: Sequence[str] = (),
        **options: Any,
    ) -> None:
        words = [sys.executable, "-c", PRELUDE + code, *map(str, place), *server]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*inside, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options
        )
        self.pid = self.process.pid
        self.said: list[str] = []
        self.errors: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += list(self.process.stderr)

    def line(self, timeout: float = 60.0) -> str:
        """Return the next line of the process's output."""
        line = self._lines.get(timeout=timeout)
        assert line is not None, f"it ended instead: {self.ended()}, {self.errors[-20:]}"
        self.said.append(line)
        return line

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def ended(self, timeout: float = 60.0) -> int:
        """Wait for its end; return its exit code (negative: the signal)."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(5.0)
        return code

    def close(self) -> None:
        """Kill the process if it is left, and close its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.ended()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def asleep(self, name: str = "futex", timeout: float = 60.0) -> bool:
        """Wait until its main thread sleeps in a system call of that name (see wchan).

        A "shared futex" is the engine's: the GIL's is private, as those of Python's locks.
        """
        shared, name = name.startswith("shared "), name.removeprefix("shared ")
        limit = time.monotonic() + timeout
        while time.monotonic() < limit:
            with open(f"/proc/{self.pid}/wchan") as file:
                if name in file.read() and (not shared or self._shares_futex()):
                    return True
        return False

    def _shares_futex(self) -> bool:
        with open(f"/proc/{self.pid}/syscall") as file:
            words = file.read().split()
        return len(words) > 2 and not int(words[2], 16) & PRIVATE_FUTEX


def all_say(ranks: Sequence[Rank], word: str, timeout: float = 60.0) -> None:
    """Require that the next line of each rank is this."""
    assert [rank.line(timeout) for rank in ranks] == [word] * len(ranks)


class Job:
    """`size` ranks that run the same code."""

    def __init__(self, code: str, size: int = 2, cwd: str | None = None) -> None:
        self._store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        port = self._store.port
        self.ranks = [Rank(code, (rank, size, port), cwd=cwd) for rank in range(size)]

    def __enter__(self) -> list[Rank]:
        return self.ranks

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if error is not None:
            self._tell_of(error)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """End the job only if the block fails."""
        try:
            yield
        except BaseException as error:
            self.close()
            self._tell_of(error)
            raise

    def _tell_of(self, error: BaseException) -> None:
        for number, rank in enumerate(self.ranks):
            error.add_note(f"rank {number}: {rank.said[-20:]}\n{''.join(rank.errors)}")

    def close(self) -> None:
        """Kill the processes that are left, and close their pipes."""
        for rank in self.ranks:
            rank.close()
        self._store.close()
