"""On a terminal rank 0 looks as if it ran alone; the lines of other ranks are prefixed."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from at_terminal import AtTerminal
from clocks import soon

Script = Callable[[str], str]
# Each line in a single write, so that no line of another rank comes between.
LOOK = """
    import os, sys
    width = os.get_terminal_size(1).columns if sys.stdout.isatty() else None
    sys.stdout.write(f"{sys.stdout.isatty()} {width}\\n")
    sys.stdout.write("bar\\r")
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal of 77 columns: (the user's end, the program's end)."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (20, 77))
    yield ours, theirs
    os.close(ours)


def screen_of(terminal: tuple[int, int], environment: dict[str, str], *words: str) -> str:
    """Run the launcher on the terminal; return its output there."""
    ours, theirs = terminal
    command = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", "2", *words]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text = b""
    while data := _read(ours):
        text += data
    assert process.wait(timeout=60) == 0
    return text.decode()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""  # EIO: the other end is closed everywhere


def test_rank_0_has_a_terminal_of_the_same_size(
    terminal: tuple[int, int], environment: dict[str, str], script: Script
) -> None:
    shown = screen_of(terminal, environment, script(LOOK))
    assert "True 77\r\n" in shown
    assert "[rank 1] False None\r\n" in shown
    assert "[rank 0]" not in shown


def test_prefixes_can_be_forced(
    terminal: tuple[int, int], environment: dict[str, str], script: Script
) -> None:
    shown = screen_of(terminal, environment, "--prefix", script(LOOK))
    assert "[rank 0] False None\r\n" in shown


def test_prefixes_can_be_left_out(
    terminal: tuple[int, int], environment: dict[str, str], script: Script
) -> None:
    shown = screen_of(terminal, environment, "--no-prefix", script(LOOK))
    assert "True 77\r\n" in shown
    assert "False None\r\n" in shown
    assert "[rank" not in shown


def test_ctrl_c_amid_imports_ends_all_ranks_without_a_traceback(
    environment: dict[str, str], script: Script, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import signal\nprint('importing')\nsignal.pause()\n")
    path = script("import slow")

    def attempt() -> float:
        words = ["-m", "nc10d.run", "--nproc-per-node", "4", path]
        with AtTerminal([sys.executable, *words], environment) as job:
            job.read_until("importing", times=4)
            code, seconds = job.interrupt()
        assert code == 130
        assert "Traceback" not in job.screen, job.screen
        assert "nc10d-run: ended by SIGINT" in job.screen
        return seconds

    assert soon(1.0, attempt)
