"""Output on its way to the user: lines stay whole while other ranks write."""

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
    OutputError,
    OutputStream,
    Screen,
    Sink,
    line_prefix,
    prefixed,
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
    assert b"".join(lines + rest) == b"".join(parts)
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert not any(b"\n" in line for line in rest)


def test_a_line_without_end_comes_in_pieces() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (LONGEST_LINE + 1)) == [b"x" * (LONGEST_LINE + 1)]
    assert splitter.flush() == []


@given(st.text(alphabet="ab\r", max_size=9).map(str.encode), st.sampled_from([b"", b"\n"]))
def test_a_prefix_changes_nothing_else_in_a_line(text: bytes, newline: bytes) -> None:
    line = prefixed(text + newline, b"[0] ")
    assert line.replace(b"[0] ", b"") == text + b"\n"
    assert all(part.startswith(b"[0] ") for part in line.split(b"\r") if part.strip())


@pytest.mark.parametrize(
    ("line", "expected"),
    [(b"plain", b"plain"), (b"10%\r50%\r100%\n", b"100%"), (b"dos\r\n", b"dos"), (b"", b"")],
)
def test_the_report_of_a_failure_has_the_last_state_of_a_progress_bar(
    line: bytes, expected: bytes
) -> None:
    assert visible(line) == expected


def test_a_stream_prefixes_whole_lines_and_keeps_them(
    shown: tuple[Sink, Callable[[], bytes]], tmp_path: Path
) -> None:
    sink, read = shown
    source, rank = os.pipe()
    stream = OutputStream(source, sink, line_prefix(3), tmp_path / "log")
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


def test_without_a_prefix_no_byte_is_changed(shown: tuple[Sink, Callable[[], bytes]]) -> None:
    sink, read = shown
    source, rank = os.pipe()
    stream = OutputStream(source, sink, b"")
    said = b"one\rtwo\n\r\n\n\x1b[2K\xff" + b"y" * 40_000 + b"\nno newline"
    os.write(rank, said)
    os.close(rank)
    stream.drain()
    assert read() == said


def test_output_that_cannot_be_written_is_dropped_and_told(tmp_path: Path) -> None:
    failures: list[OutputError] = []
    with SignalPipe() as signals, open("/dev/full", "wb") as full:
        source, rank = os.pipe()
        sink = Sink(full.fileno(), Screen(), signals)
        stream = OutputStream(source, sink, b"", Path("/dev/full"), failures)
        os.write(rank, b"one\ntwo\n")
        stream.drain()
        os.write(rank, b"three\n")
        os.close(rank)
        stream.drain()
    assert not stream.open
    assert stream.last_lines() == ("one", "two", "three")
    why = "No space left on device"
    assert [str(error) for error in failures] == [
        f"cannot write to /dev/full: {why}",
        f"cannot write to stderr: {why}",
    ]


@pytest.mark.parametrize(
    ("unfinished", "expected"),
    [(b"", b""), (b"epoch ", b"\n"), (b"\r50%", b"\r\x1b[K"), (b"\x1b[2K50%", b"\r\x1b[K")],
)
def test_a_line_never_runs_into_an_unfinished_line_on_the_screen(
    shown: tuple[Sink, Callable[[], bytes]], unfinished: bytes, expected: bytes
) -> None:
    sink, read = shown
    sink.write_raw(b"x\n" + unfinished, unfinished)
    sink.write_lines([b"hello\n"], line_prefix(1))
    assert read() == b"x\n" + unfinished + expected + b"[rank 1] hello\n"


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (b"done\n", b""),
        (b"\x1b[?25l\r50%", b"\x1b[?25h\n"),
        (b"\x1b[?25l\r100%\n\x1b[?25h", b""),
        (b"no newline", b"\n"),
    ],
)
def test_a_terminal_is_left_with_a_cursor_on_a_line_of_its_own(
    left: bytes, expected: bytes
) -> None:
    screen = Screen()
    screen.note_raw(left, left.rpartition(b"\n")[2])
    assert screen.to_clean_end() == expected
    assert screen.to_clean_end() == b""


IMPORTING = b'Traceback (most recent call last):\n  File "x", line 1\n    import y\nKeyb\n'


@pytest.mark.parametrize("prefix", [line_prefix(3), None])
def test_a_filtered_stream_ends_without_the_traceback_of_an_import(
    shown: tuple[Sink, Callable[[], bytes]], tmp_path: Path, prefix: bytes | None
) -> None:
    sink, read = shown
    source, rank = os.pipe()
    stream = OutputStream(source, sink, prefix, tmp_path / "log")
    os.write(rank, b"on")
    stream.drain()
    stream.filter_tracebacks()
    os.write(rank, b"e\n" + IMPORTING)
    os.close(rank)
    stream.drain()
    assert read() == (prefix or b"") + b"one\n"
    assert (tmp_path / "log").read_bytes() == b"one\n" + IMPORTING


def test_a_filtered_stream_that_goes_on_and_on_is_shown(tmp_path: Path) -> None:
    source, rank = os.pipe()
    with SignalPipe() as signals, (tmp_path / "shown").open("wb") as shown:
        stream = OutputStream(source, Sink(shown.fileno(), Screen(), signals), b"")
        stream.filter_tracebacks()
        for _ in range(MOST_HELD // 4096 + 1):
            os.write(rank, b"y" * 4095 + b"\n")
            stream.drain()
        assert (tmp_path / "shown").stat().st_size > MOST_HELD
        os.close(rank)
        stream.close()
