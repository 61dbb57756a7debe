"""A command ended by Ctrl-C: exit code 130 and no output, wherever it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import os, signal
from nc10d.run.signals import run_interruptible

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    return 0

signal.signal(signal.SIGINT, signal.{handler})
raise SystemExit(run_interruptible({main}))
"""


def run(folder: Path, main: str, handler: str) -> subprocess.CompletedProcess[bytes]:
    (folder / "command.py").write_text(COMMAND.format(main=main, handler=handler))
    words = [sys.executable, "-m", "command"]  # as `python -m nc10d.bench` is run
    return subprocess.run(words, capture_output=True, timeout=200, cwd=folder)


@pytest.mark.parametrize("main", ["interrupt", "lambda: exec('interrupt()', globals())"])
def test_the_code_is_130_wherever_ctrl_c_comes(tmp_path: Path, main: str) -> None:
    done = run(tmp_path, main, "default_int_handler")
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    assert run(tmp_path, "interrupt", "SIG_IGN").returncode == 0
