"""Fixtures that run the launcher for real: a script in its own folder, started as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import ports
import pytest

LAUNCHER = [sys.executable, "-m", "nc10d.run"]
Launch = Callable[..., subprocess.CompletedProcess[Any]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script; return its path."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(dedent(text))
        return str(path)

    return write


@pytest.fixture
def environment() -> dict[str, str]:
    """The user's environment, without the variables of an outer launcher or test."""
    ours = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in ours}


@pytest.fixture
def free_port() -> int:
    """A port of this machine that is free at the moment."""
    return ports.free_port()


@pytest.fixture
def launch(environment: dict[str, str]) -> Launch:
    """Run the launcher to its end."""

    def run(
        *words: str, timeout: float = 110, text: bool = True
    ) -> subprocess.CompletedProcess[Any]:
        return subprocess.run(
            [*LAUNCHER, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=text,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Start the launcher and let it run; kill it at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*LAUNCHER, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
