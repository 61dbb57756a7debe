"""Failures with odd names and reasons reach all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nc10d.backend.cpu.memory import host_peer
from nc10d.backend.cpu.memory.host_peer import HostPeer
from nc10d.errors import Aborted, DistError, PeerLost
from nc10d.testing import run_ranks


def test_the_end_of_a_process_is_reported_whatever_bytes_its_name_has() -> None:
    # prctl(PR_SET_NAME): a name that is cut in the middle of a letter.
    code = "import ctypes, os; ctypes.CDLL(None).prctl(15, b'\\xd1\\x81\\xd0'); os._exit(3)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        nowhere: Any = None
        peer = HostPeer(1, 1, process.pid, "another", "host", nowhere, -1)
        assert host_peer.death(peer) == "it exited with code 3"


class Own(DistError):
    """A caller's error with a constructor of its own."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Wordless(Exception):
    """A caller's error that has no text."""

    def __str__(self) -> str:
        raise LookupError("no words")


REASONS: list[Callable[[], BaseException]] = [
    lambda: PeerLost("why", rank=np.int64(1), seq=np.uint8(3)),
    lambda: PeerLost("why", last={np.int64(0): np.int64(7)}),
    lambda: PeerLost("why", last=dict.fromkeys(range(1000), 10**9)),
    lambda: PeerLost("why", cause=ValueError("a fan")),  # type: ignore[arg-type]
    lambda: Own(3, "why"),
    Wordless,
]


@pytest.mark.parametrize("reason", REASONS)
def test_an_abort_reaches_the_others_whatever_its_reason(
    reason: Callable[[], BaseException],
) -> None:
    def call(group: Any) -> DistError:
        if group.rank == 1:
            group.abort(reason())
        try:
            group.barrier()
        except DistError as error:
            return error
        raise AssertionError("nobody came")

    error, _ = run_ranks(call, 2, timeout=30)
    assert isinstance(error, PeerLost | Aborted), error
    assert "why" in str(error) or "Wordless" in str(error)
