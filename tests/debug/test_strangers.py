"""Strangers, as the table of faults plays them: doors and parsers that let them in are told."""

from __future__ import annotations

import random
import socket

import pytest

from benchmarks.faults import strangers
from benchmarks.faults.cells import HOST
from benchmarks.faults.libraries import Nc10d
from nc10d.errors import DistError


def test_a_port_that_stays_open_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nc10d()
    library.warm()
    with socket.create_server((HOST, 0)) as door:  # in place of a rank's: whoever comes is kept
        port = door.getsockname()[1]
        monkeypatch.setattr(strangers, "_STAY", 0.1)
        monkeypatch.setattr(strangers, "_ports", lambda pid: [port])
        told = strangers.at_ports(library, 3).words
    assert "3 kept, 10 let in afterwards" in told


def test_a_frame_that_is_taken_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nc10d.auth.handshake.compare_digest", lambda *digests: True)
    assert strangers._sealed(100, random.Random(1)) > 0
    with pytest.raises(DistError, match="messages that are none"):
        strangers.mutated(Nc10d(), 400)
