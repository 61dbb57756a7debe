"""The ends of groups in the table of faults: a library is charged for its own resources only."""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults import endings
from benchmarks.libraries.nc10d import Nc10d


class Still(Nc10d):
    """A library that does nothing."""

    def join(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Do nothing."""

    def call(self, kind: int, count: int) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class Untidy(Still):
    """A library whose first rank leaves a file at a path, before it can be killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def join(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Leave the file."""
        if rank == 0:
            self._path.touch()


class Temporary(Still):
    """A library whose first rank leaves a temporary file."""

    def join(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Leave the file."""
        if rank == 0:
            os.close(tempfile.mkstemp()[0])


def test_files_that_ranks_leave_in_their_folders_are_counted() -> None:
    assert endings.all_killed(Untidy(Path("here")), 1).words == "1 times: 1 files left"
    assert endings.all_killed(Temporary(), 1).words == "1 times: 1 files left"
    assert endings.all_killed(Still(), 1).words == "1 times: no files left"


@pytest.mark.parametrize(("name", "word"), [("nc10d-test", "1"), ("test-of-nobody", "no")])
def test_of_the_shared_place_only_the_librarys_own_files_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, word: str
) -> None:
    monkeypatch.setattr(endings, "_SHARED", tmp_path)
    said = endings.all_killed(Untidy(tmp_path / name), 1).words
    assert said == f"1 times: {word} files left"


def test_files_of_other_programs_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert endings.all_killed(Untidy(tmp_path / "x"), 1).words == "1 times: no files left"
    assert (tmp_path / "x").exists()


class Lingering(Still):
    """A library whose groups leave a thread, which ends when permitted or after a while."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def end(self) -> None:
        """Leave a thread that waits so long; None: for ever."""
        threading.Thread(target=threading.Event().wait, args=(self._seconds,), daemon=True).start()


def test_a_process_that_ends_late_has_not_stayed() -> None:
    assert endings.cycles(Lingering(0.5), 1).words == "1 cycles: nothing stays"


def test_a_process_that_does_not_end_has_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_STAYS", 0.1)
    assert endings.cycles(Lingering(None), 3).words == "3 cycles: 3 more threads"


class Hoarding(Still):
    """A library whose dropped groups keep a MiB each."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []

    def drop(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Keep separate pages: the heap may have room that was in memory before."""
        kept = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        kept.write(os.urandom(1 << 20))
        self._kept.append(kept)


class Dropping(Still):
    """A library without groups."""

    def drop(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Do nothing."""


@pytest.mark.slow
def test_memory_that_dropped_groups_keep_is_reported() -> None:
    words = endings.dropped(Hoarding(), 3).words
    assert words.startswith("3 groups: nothing stays, ")
    assert 2.5 < float(words.split()[-2]) < 4.0
    assert words.endswith(" MiB")
    assert endings.dropped(Dropping(), 3).words == "3 groups: nothing stays, no more than 1 MiB"


class Loud(Still):
    """A library that prints at exit."""

    @property
    def dist(self) -> Any:
        """A module without groups."""
        return SimpleNamespace(new_group=int, destroy_process_group=str)

    def begin(self, group: Any = None) -> Any:
        """Print at exit, to the descriptor: pytest captures print()."""
        atexit.register(os.write, 2, b"one thing more")


@pytest.mark.slow
def test_output_at_exit_is_reported() -> None:
    assert endings.left(Loud(), 3).words == "says something 3x"


class Dying(Still):
    """A library that ends its process in a call."""

    def call(self, kind: int, count: int) -> None:
        """Die."""
        signal.raise_signal(signal.SIGTERM)


class Mute(Still):
    """A library whose calls never return."""

    def call(self, kind: int, count: int) -> None:
        """Wait for ever."""
        threading.Event().wait()


def test_a_forked_childs_end_is_reported_and_its_number_is_never_killed() -> None:
    before = {*threading.enumerate()}
    assert endings.end_of_child(Still()) == "nothing"
    assert endings.end_of_child(Dying()) == "signal 15"
    assert {*threading.enumerate()} <= before


def test_a_forked_child_without_a_report_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_SILENT", 0.1)
    assert endings.end_of_child(Mute()) == "silence"
