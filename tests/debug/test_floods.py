"""Floods of strangers in the table of faults: ports and parsers that accept them are reported."""

from __future__ import annotations

import random
import socket

import pytest

from benchmarks.faults import floods
from benchmarks.libraries.c10d import HOST
from benchmarks.libraries.nc10d import Nc10d
from nc10d.errors import DistError


def test_a_port_that_stays_open_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nc10d()
    library.warm()
    with socket.create_server((HOST, 0)) as listener:  # keeps every connection
        port = listener.getsockname()[1]
        monkeypatch.setattr(floods, "_STAY", 0.1)
        monkeypatch.setattr(floods, "_ports", lambda pid: [port])
        words = floods.at_ports(library, 3).words
    assert "3 kept, 10 let in afterwards" in words


def test_a_frame_that_is_accepted_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nc10d.auth.handshake.compare_digest", lambda *digests: True)
    assert floods.forged_frames(100, random.Random(1)) > 0
    with pytest.raises(DistError, match="messages that are none"):
        floods.mutated(Nc10d(), 400)
