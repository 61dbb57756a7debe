"""Output on its way to the user: whole lines, whoever else is writing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.run.output import (
    LONGEST_LINE,
    MOST_HELD,
    LineSplitter,
    OutputStream,
    Screen,
    Sink,
    prefix,
    visible,
)
from nc10d.run.signals import SignalPipe

pieces = st.lists(st.text(alphabet="ab\n\r", max_size=9).map(str.encode), max_size=9)
Show = Callable[..., OutputStream]


@pytest.fixture
def shown() -> Iterator[tuple[Sink, Callable[[], bytes]]]:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with SignalPipe() as signals:
        yield Sink(write_end, Screen(), signals), lambda: os.read(read_end, 1 << 16)
    os.close(read_end)
    os.close(write_end)


@given(pieces)
def test_no_byte_is_lost_however_the_output_is_cut(parts: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for part in parts for line in splitter.feed(part)]
    rest = splitter.flush()
    assert b"".join(line + b"\n" for line in lines) + b"".join(rest) == b"".join(parts)
    assert all(b"\n" not in line for line in lines + rest)


def test_a_line_without_end_is_cut() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (LONGEST_LINE + 1)) == [b"x" * (LONGEST_LINE + 1)]
    assert splitter.flush() == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [(b"plain", b"plain"), (b"10%\r50%\r100%", b"100%"), (b"dos\r", b"dos"), (b"", b"")],
)
def test_of_a_progress_bar_the_last_state_counts(line: bytes, expected: bytes) -> None:
    assert visible(line) == expected


def test_a_stream_prefixes_whole_lines_and_keeps_them(
    shown: tuple[Sink, Callable[[], bytes]], tmp_path: Path
) -> None:
    sink, read = shown
    source, rank = os.pipe()
    stream = OutputStream(source, sink, prefix(3), tmp_path / "log")
    os.write(rank, b"one\ntw")
    stream.drain()
    assert read() == b"[rank 3] one\n"
    os.write(rank, b"o\nthree")
    os.close(rank)
    stream.drain()
    assert read() == b"[rank 3] two\n[rank 3] three\n"
    assert not stream.open
    assert stream.last_lines() == ("one", "two", "three")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nthree"


@pytest.mark.parametrize(
    ("unfinished", "lead"),
    [(b"", b""), (b"epoch ", b"\n"), (b"\r50%", b"\r\x1b[K"), (b"\x1b[2K50%", b"\r\x1b[K")],
)
def test_a_line_never_runs_into_what_stands_on_the_screen(
    shown: tuple[Sink, Callable[[], bytes]], unfinished: bytes, lead: bytes
) -> None:
    sink, read = shown
    sink.raw(b"x\n" + unfinished, unfinished)
    sink.lines([b"hello"], prefix(1))
    assert read() == b"x\n" + unfinished + lead + b"[rank 1] hello\n"


@pytest.mark.parametrize(
    ("left", "farewell"),
    [
        (b"done\n", b""),
        (b"\x1b[?25l\r50%", b"\x1b[?25h\n"),
        (b"\x1b[?25l\r100%\n\x1b[?25h", b""),
        (b"no newline", b"\n"),
    ],
)
def test_a_terminal_is_left_with_a_cursor_on_a_line_of_its_own(
    left: bytes, farewell: bytes
) -> None:
    screen = Screen()
    screen.passed(left, left.rpartition(b"\n")[2])
    assert screen.farewell() == farewell
    assert screen.farewell() == b""


IMPORTING = b'Traceback (most recent call last):\n  File "x", line 1\n    import y\nKeyb\n'


@pytest.mark.parametrize("mark", [prefix(3), None])
def test_a_hushed_stream_ends_without_the_traceback_of_an_import(
    shown: tuple[Sink, Callable[[], bytes]], tmp_path: Path, mark: bytes | None
) -> None:
    sink, read = shown
    source, rank = os.pipe()
    stream = OutputStream(source, sink, mark, tmp_path / "log")
    os.write(rank, b"on")
    stream.drain()
    stream.hush()
    os.write(rank, b"e\n" + IMPORTING)
    os.close(rank)
    stream.drain()
    assert read() == (mark or b"") + b"one\n"
    assert (tmp_path / "log").read_bytes() == b"one\n" + IMPORTING


def test_a_hushed_stream_that_goes_on_and_on_is_shown(tmp_path: Path) -> None:
    source, rank = os.pipe()
    with SignalPipe() as signals, (tmp_path / "shown").open("wb") as shown:
        stream = OutputStream(source, Sink(shown.fileno(), Screen(), signals), b"")
        stream.hush()
        for _ in range(MOST_HELD // 4096 + 1):
            os.write(rank, b"y" * 4095 + b"\n")
            stream.drain()
        assert (tmp_path / "shown").stat().st_size > MOST_HELD
        os.close(rank)
        stream.close()
