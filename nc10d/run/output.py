"""What ranks print, on its way to the user: whole lines, prefixed, stdout and stderr apart.

A `OutputStream` carries one rank's stdout or stderr. Lines go out whole, each with its rank in
front,
so that lines of several ranks never mix. A raw stream (rank 0 on a terminal) passes bytes as they
are: a progress bar moves the cursor, and a prefix would break it. Files get the bytes unchanged.
"""

from __future__ import annotations

import os
import re
import select
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nc10d.run.signals import SignalPipe
from nc10d.run.traceback_filter import hushed

READ_BYTES = 1 << 16
PIPE_READS = 16
LONGEST_LINE = 1 << 16
MOST_HELD = 1 << 17
TAIL_LINES = 20
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]")


class LineSplitter:
    """Cuts bytes into lines: `feed` returns the complete ones, `flush` the rest.

    A line ends with a newline; one longer than LONGEST_LINE is cut, so that a rank that never
    writes a newline cannot fill the launcher's memory.
    """

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take `data`; return the lines that it completes, without their newlines."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            lines.append(self.rest)
            self.rest = b""
        return lines

    def flush(self) -> list[bytes]:
        """Return the last line where it had no newline."""
        rest, self.rest = self.rest, b""
        return [rest] if rest else []


def visible(line: bytes) -> bytes:
    """Return what a terminal would show of `line`: the text after the last carriage return.

    A progress bar in a pipe redraws itself with carriage returns; only its last state is news.
    """
    return line.removesuffix(b"\r").rpartition(b"\r")[2]


def prefix(rank: int) -> bytes:
    """Return what stands in front of each line of `rank`."""
    return f"[rank {rank}] ".encode()


class Screen:
    """How a raw stream has left a terminal: its unfinished line, and whether the cursor shows."""

    def __init__(self) -> None:
        self._unfinished = b""
        self._cursor_hidden = False

    def passed(self, data: bytes, unfinished: bytes) -> None:
        """Note that `data` was written as it is; `unfinished` is what follows its last newline."""
        self._unfinished = unfinished
        hidden, shown = data.rfind(HIDE_CURSOR), data.rfind(SHOW_CURSOR)
        if hidden != shown:
            self._cursor_hidden = hidden > shown

    def lead(self) -> bytes:
        """Return what brings the cursor to the start of an empty line."""
        before, self._unfinished = self._unfinished, b""
        if b"\r" in before or b"\x1b" in before:
            return b"\r\x1b[K"  # a bar, which will be drawn again: wipe it
        return b"\n" if before else b""  # text, which won't: leave it

    def farewell(self) -> bytes:
        """Return what leaves the terminal as a program should that was killed at its bar."""
        text = _CONTROL.sub(b"", self._unfinished)
        farewell = (SHOW_CURSOR if self._cursor_hidden else b"") + (b"\n" if text else b"")
        self.passed(farewell, b"")
        return farewell


@dataclass(frozen=True, slots=True)
class Sink:
    """Where lines go: a descriptor, and the screen behind it (shared by stdout and stderr)."""

    fd: int
    screen: Screen
    signals: SignalPipe

    def lines(self, lines: list[bytes], mark: bytes) -> None:
        """Write whole lines, each behind `mark`."""
        text = b"".join(mark + line + b"\n" for line in lines)
        write_all(self.fd, self.screen.lead() + text, self.signals)

    def raw(self, data: bytes, unfinished: bytes) -> None:
        """Write bytes as they are; `unfinished` is what follows the last newline so far."""
        write_all(self.fd, data, self.signals)
        self.screen.passed(data, unfinished)

    def leave(self) -> None:
        """Put a terminal in order behind a raw stream that has ended."""
        if os.isatty(self.fd):
            write_all(self.fd, self.screen.farewell(), self.signals)


class OutputStream:
    """One rank's stdout or stderr: read from `source`, shown on `sink`, kept in `file`.

    Without a `sink` nothing is shown; `mark` is put before each line, None passes the bytes as
    they come. `close` is idempotent.
    """

    def __init__(
        self, source: int, sink: Sink | None, mark: bytes | None, file: Path | None = None
    ) -> None:
        os.set_blocking(source, False)
        self.source = source
        self.open = True
        self._sink = sink
        self._mark = mark
        self._splitter = LineSplitter()
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._file: BinaryIO | None = file.open("wb", buffering=0) if file else None
        self._held: bytes | None = None

    def hush(self) -> None:
        """From now on, leave out what an interrupted import says; the file keeps it.

        Nothing is shown until the rank has ended or has written MOST_HELD bytes.
        """
        self._held = self._held or b""

    def pump(self) -> bool:
        """Carry on what has come; return False when there is no more for now, or ever."""
        try:
            data = os.read(self.source, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # a pseudo-terminal says EIO where a pipe says end of file
        if not data:
            self.close()
            return False
        self._carry(data)
        return True

    def drain(self) -> None:
        """Carry on everything that has been written so far; never blocks on the rank.

        A pipe holds no more than this many reads; whoever writes on and on is not waited for.
        """
        for _ in range(PIPE_READS):
            if not self.open or not self.pump():
                break

    def last_lines(self) -> tuple[str, ...]:
        """Return the last TAIL_LINES lines, for a report."""
        return tuple(line.decode(errors="replace") for line in self._tail)

    def close(self) -> None:
        """Show the unfinished last line, then give the descriptors back."""
        if self.open:
            self.open = False
            self._release()
            self._show(self._splitter.flush())
            if self._mark is None and self._sink is not None:
                self._sink.leave()
            os.close(self.source)
            if self._file:
                self._file.close()

    def _carry(self, data: bytes) -> None:
        if self._file:
            self._file.write(data)
        if self._held is None:
            self._pass(data)
            return
        self._held += data
        if len(self._held) > MOST_HELD:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held:
            self._pass(hushed(held))

    def _pass(self, data: bytes) -> None:
        lines = self._splitter.feed(data)
        if self._mark is None and self._sink is not None:
            self._sink.raw(data, self._splitter.rest)
        self._show(lines)

    def _show(self, lines: list[bytes]) -> None:
        shown = [visible(line) for line in lines]
        self._tail.extend(shown)
        if shown and self._mark is not None and self._sink is not None:
            self._sink.lines(shown, self._mark)


def write_all(fd: int, data: bytes, signals: SignalPipe) -> None:
    """Write all of `data`, however slow its reader is; give up if the job is to end meanwhile.

    A reader that stands still (a pager, a terminal stopped by Ctrl-S) must not keep Ctrl-C from
    the ranks. A pipe that is ready takes PIPE_BUF bytes without blocking.
    """
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    ready.register(signals.fd, select.POLLIN)
    view = memoryview(data)
    while view:
        if fd in dict(ready.poll(0 if signals.ending else None)):
            view = view[os.write(fd, view[: select.PIPE_BUF]) :]
        elif signals.ending:
            return
        else:
            signals.collect()
