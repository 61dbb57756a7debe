"""The ranks' output on its way to the user: whole lines, prefixed, stdout and stderr apart.

An `OutputStream` carries a rank's stdout or stderr. Lines go out whole and behind a prefix, so that
several ranks' lines never mix. An empty prefix changes no byte. A raw stream (rank 0 on a
terminal) does not wait for a line's end either: a progress bar moves the cursor. Files get the
bytes unchanged.
"""

from __future__ import annotations

import itertools
import os
import re
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nc10d.run.signals import SignalPipe

READ_BYTES = 1 << 16
PIPE_READS = 16
"""A full pipe is empty after so many reads."""
LONGEST_LINE = 1 << 26
"""Bytes; a longer line goes out in pieces."""
MOST_HELD = 1 << 17
"""Bytes held back for the traceback filter."""
TAIL_LINES = 20
TAIL_BYTES = 1000
"""Bytes of a line that a failure report shows."""
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_REDRAWS = re.compile(rb"\r(?![\r\n]|\Z)")
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]")


class OutputError(Exception):
    """The ranks' output cannot be written; the message says where and why."""


class LineSplitter:
    """Cuts bytes into lines: `feed` returns the complete lines, `flush` the rest.

    A line keeps its newline. A line longer than LONGEST_LINE comes in pieces, so that a rank that
    never writes a newline cannot fill the launcher's memory.
    """

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take `data`; return the completed lines."""
        whole, newline, rest = data.rpartition(b"\n")
        lines = []
        if newline:
            lines = [line + b"\n" for line in (bytes(self.rest) + whole).split(b"\n")]
            self.rest.clear()
        self.rest += rest
        return lines + (self.flush() if len(self.rest) > LONGEST_LINE else [])

    def flush(self) -> list[bytes]:
        """Return the unfinished last line, if any."""
        rest = bytes(self.rest)
        self.rest.clear()
        return [rest] if rest else []


def visible(line: bytes) -> bytes:
    """Return the part of `line` that a terminal would show: after the last carriage return.

    A progress bar in a pipe redraws itself with carriage returns; its last state matters.
    """
    return line.rstrip(b"\r\n").rpartition(b"\r")[2]


def prefixed(line: bytes, prefix: bytes) -> bytes:
    """Return `line` with `prefix` at its start, and wherever a carriage return goes back to it.

    So a terminal shows the prefix before the last state of a progress bar, and a file keeps every
    state. A missing newline is added.
    """
    ending = b"" if line.endswith(b"\n") else b"\n"
    return prefix + _REDRAWS.sub(lambda _: b"\r" + prefix, line) + ending


def line_prefix(rank: int) -> bytes:
    """Return the prefix for each line from `rank`."""
    return f"[rank {rank}] ".encode()


class Screen:
    """The state of the user's terminal behind a raw stream: unfinished line, hidden cursor."""

    def __init__(self) -> None:
        self._unfinished = b""
        self._cursor_hidden = False

    def note_raw(self, data: bytes, unfinished: bytes) -> None:
        """Record that raw `data` was written; `unfinished` is the line that stays unfinished."""
        self._unfinished = unfinished
        hidden, shown = data.rfind(HIDE_CURSOR), data.rfind(SHOW_CURSOR)
        if hidden != shown:
            self._cursor_hidden = hidden > shown

    def to_empty_line(self) -> bytes:
        """Return the bytes that bring the cursor to the start of an empty line."""
        before, self._unfinished = self._unfinished, b""
        if b"\r" in before or b"\x1b" in before:
            return b"\r\x1b[K"  # a progress bar: wipe it, the rank will draw it again
        return b"\n" if before else b""  # text: keep it, the rank won't write it again

    def to_clean_end(self) -> bytes:
        """Return the bytes that show the cursor on a new line, as after a separate program."""
        text = _CONTROL.sub(b"", self._unfinished)
        ending = (SHOW_CURSOR if self._cursor_hidden else b"") + (b"\n" if text else b"")
        self.note_raw(ending, b"")
        return ending


@dataclass(frozen=True, slots=True)
class Sink:
    """The destination of output: a descriptor and its screen (shared by stdout and stderr)."""

    fd: int
    screen: Screen
    signals: SignalPipe

    def write_lines(self, lines: list[bytes], prefix: bytes) -> None:
        """Write lines, each behind `prefix`; with an empty one, their bytes."""
        text = b"".join([prefixed(line, prefix) for line in lines] if prefix else lines)
        write_all(self.fd, self.screen.to_empty_line() + text, self.signals)

    def write_raw(self, data: bytes, unfinished: bytes | bytearray) -> None:
        """Write bytes as they are; `unfinished` is the text after the last newline so far."""
        write_all(self.fd, data, self.signals)
        self.screen.note_raw(data, bytes(unfinished[-MOST_HELD:]))

    def end_raw(self) -> None:
        """Put the terminal in order after a raw stream's end."""
        if os.isatty(self.fd):
            write_all(self.fd, self.screen.to_clean_end(), self.signals)


class OutputStream:
    """A rank's stdout or stderr: read from `source`, shown on `sink`, kept in `file`.

    Without a `sink` nothing is shown. `prefix` is put before each line; with None the stream is
    raw. Where output cannot be written an OutputError is appended to `failures`, and the stream
    drops what it reads: a rank must not wait for its launcher. `close` is idempotent.
    """

    def __init__(
        self,
        source: int,
        sink: Sink | None,
        prefix: bytes | None,
        file: Path | None = None,
        failures: list[OutputError] | None = None,
    ) -> None:
        os.set_blocking(source, False)
        self.source = source
        self.open = True
        self._sink = sink
        self._prefix = prefix
        self._splitter = LineSplitter()
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._path = file
        self._file: BinaryIO | None = file.open("wb", buffering=0) if file else None
        self._failures = [] if failures is None else failures
        self._held: bytes | None = None

    def filter_tracebacks(self) -> None:
        """Drop the traceback of an interrupted import from now on; the file keeps the traceback.

        Nothing is shown until the rank has ended or has written MOST_HELD bytes.
        """
        self._held = self._held or b""

    def pump(self) -> bool:
        """Read once and pass the bytes on; return False if there are none, for now or ever."""
        try:
            data = os.read(self.source, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # a pseudo-terminal ends with EIO, a pipe with an empty read
        if not data:
            self.close()
            return False
        self._receive(data)
        return True

    def drain(self) -> None:
        """Pass on everything that has been written so far; never blocks on the rank.

        At most PIPE_READS reads, the content of a full pipe: a rank may go on writing for ever.
        """
        for _ in range(PIPE_READS):
            if not self.open or not self.pump():
                break

    def last_lines(self) -> tuple[str, ...]:
        """Return the last TAIL_LINES lines, for a failure's report."""
        return tuple(line.decode(errors="replace") for line in self._tail)

    def close(self) -> None:
        """Show the unfinished last line, then close the descriptors."""
        if self.open:
            self.open = False
            self._release()
            self._show(self._splitter.flush())
            if self._prefix is None:
                self._write(lambda sink: sink.end_raw())
            os.close(self.source)
            if self._file:
                self._file.close()

    def _receive(self, data: bytes) -> None:
        if self._file:
            try:
                write_file(self._file, data)
            except OSError as error:
                self._file.close()
                self._file = None
                self._failed(str(self._path), error)
        if self._held is None:
            self._forward(data)
            return
        self._held += data
        if len(self._held) > MOST_HELD:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held:
            self._forward(without_import_tracebacks(held))

    def _forward(self, data: bytes) -> None:
        lines = self._splitter.feed(data)
        if self._prefix is None:
            self._write(lambda sink: sink.write_raw(data, self._splitter.rest))
        self._show(lines)

    def _show(self, lines: list[bytes]) -> None:
        self._tail.extend(visible(line)[-TAIL_BYTES:] for line in lines[-TAIL_LINES:])
        prefix = self._prefix
        if lines and prefix is not None:
            self._write(lambda sink: sink.write_lines(lines, prefix))

    def _write(self, act: Callable[[Sink], None]) -> None:
        if self._sink is not None:
            try:
                act(self._sink)
            except OSError as error:
                where, self._sink = ("stdout" if self._sink.fd == 1 else "stderr"), None
                self._failed(where, error)

    def _failed(self, where: str, cause: OSError) -> None:
        error = OutputError(f"cannot write to {where}: {cause.strerror or cause}")
        error.__cause__ = cause
        self._failures.append(error)


def write_file(file: BinaryIO, data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may take a part at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def write_all(fd: int, data: bytes, signals: SignalPipe) -> None:
    """Write all of `data`; blocks on a slow reader, but gives up when the job is to end.

    A reader that has stopped (a pager, a terminal after Ctrl-S) must not keep Ctrl-C from the
    ranks. A pipe that is ready takes PIPE_BUF bytes without blocking.
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


_TRACEBACK = re.compile(  # the first in a chain
    rb"(?<!exception occurred:\n\n)(?<!following exception:\n\n)"
    rb"^(?:Exception ignored .*\n)?Traceback \(most recent call last\):"
    rb"|^Fatal Python error: init_",
    re.MULTILINE,
)
_IMPORTING = re.compile(
    rb"^Fatal Python error: init_"
    rb"|^    (?:import|from) "  # the source line of a frame
    rb'|^  File "<frozen (?:importlib|site|zipimport|encodings|codecs)'
    rb"|^  File .*, in import_module$",
    re.MULTILINE,
)
_FINALISER = re.compile(
    rb"^Exception ignored (?:in|while).*\n"
    rb"(?:Traceback \(most recent call last\):\n(?: .*\n)*.*\n?)?",
    re.MULTILINE,
)


def without_import_tracebacks(text: bytes) -> bytes:
    """Return `text` without the tracebacks that Ctrl-C causes during a rank's imports.

    Such a traceback shows where Python was importing, and nothing about the user's program.

    | text | action |
    |---|---|
    | a traceback out of an import statement, the import machinery or Python's start | cut here |
    | whatever follows it: the interpreter ending, NumPy's page of advice | cut as well |
    | an "Exception ignored" of a finaliser, whose object Ctrl-C left half made | remove |
    | any other traceback, which shows where a job hung | keep |
    """
    starts = [found.start() for found in _TRACEBACK.finditer(text)]
    for start, end in itertools.pairwise([*starts, len(text)]):
        if _IMPORTING.search(text, start, end):
            text = text[:start]
            break
    return _FINALISER.sub(b"", text)
