"""How sockets to other hosts send: not by BBR's clock, unless somebody says so."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from nc10d.backend.cpu import congestion
from nc10d.backend.cpu.congestion import VARIABLE, control, tcp_socket
from nc10d.errors import RendezvousError

ANYWHERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def _nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def kernels_own() -> str:
    with socket.socket() as wire:
        return control(wire)


@pytest.mark.parametrize("address", [ANYWHERE, "::1"])
def test_no_socket_sends_by_the_clock(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion, "PACED", kernels_own())
    monkeypatch.setattr(congestion, "UNPACED", ("nonsense", "reno"))
    with closing(tcp_socket(address)) as wire:
        assert control(wire) == "reno"
        assert wire.family == (socket.AF_INET6 if ":" in address else socket.AF_INET)


def test_another_default_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion, "PACED", "something else")
    with closing(tcp_socket(ANYWHERE)) as wire:
        assert control(wire) == kernels_own()


@pytest.mark.parametrize("asked", ["reno", ""])
def test_the_variable_names_it(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    with closing(tcp_socket(ANYWHERE)) as wire:
        assert control(wire) == (asked or kernels_own())


def test_what_can_not_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nonsense")
    with pytest.raises(RendezvousError, match=r"TCP_CONGESTION='nonsense'.* allows .*reno"):
        tcp_socket(ANYWHERE)


def test_who_is_called_sends_alike() -> None:
    for caller, called in pairs():
        assert control(caller) == control(called)
        assert not control(called).startswith(congestion.PACED)


def pairs() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a connection's two ends, made as wires.py makes them."""
    with tcp_socket(ANYWHERE) as listener, tcp_socket(ANYWHERE) as caller:
        listener.bind((ANYWHERE, 0))
        listener.listen()
        caller.connect(listener.getsockname())
        called, _ = listener.accept()
        with called:
            yield caller, called
