"""A command on its own terminal, with a screen to read and a keyboard to type on.

Waits have deadlines of tens of seconds: the tests require that an event happens, not how soon.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE = 60.0
CTRL_C = b"\x03"


class AtTerminal:
    """A running command; `screen` is its output on the terminal so far."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._keyboard, terminal = os.openpty()
        self._leader = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command],
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        self.screen = ""

    def __enter__(self) -> AtTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._leader.wait()
        os.close(self._keyboard)

    def read_until(self, text: str, times: int = 1) -> None:
        """Read the screen until `text` is on it `times` times."""
        deadline = time.monotonic() + PATIENCE
        while self.screen.count(text) < times:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._keyboard], [], [], left)[0], f"no {text!r}: {self.screen}"
            assert self._read(), f"the command ended without {text!r}: {self.screen}"

    def press(self, keys: bytes) -> None:
        """Type `keys`."""
        os.write(self._keyboard, keys)

    def interrupt(self) -> tuple[int, float]:
        """Press Ctrl-C; return the exit code, and the seconds until all processes had ended."""
        processes = [os.pidfd_open(pid) for pid in self._session()]
        began = time.monotonic()
        self.press(CTRL_C)
        while self._read():
            pass
        code = self._leader.wait(PATIENCE)
        for fd in processes:
            assert select.select([fd], [], [], PATIENCE)[0], "a process is left"
            os.close(fd)
        return code, time.monotonic() - began

    def _read(self) -> bool:
        try:
            data = os.read(self._keyboard, 4096)
        except OSError:
            return False  # EIO: the other end is closed everywhere
        self.screen += data.decode(errors="replace")
        return bool(data)

    def _session(self) -> list[int]:
        """Return the processes of the terminal's session."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = entry.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._leader.pid:
                    found.append(int(entry.parent.name))
        return found
