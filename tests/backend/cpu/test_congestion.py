"""Congestion control of sockets to other hosts: not BBR, unless the user asks for it."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from peer_sockets import close, join

from nc10d.backend.cpu.transport import addresses
from nc10d.backend.cpu.transport.addresses import VARIABLE, control, tcp_socket
from nc10d.errors import RendezvousError
from nc10d.store import HashStore

ANYWHERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def _nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def kernels_own() -> str:
    with socket.socket() as wire:
        return control(wire)


@pytest.mark.parametrize("address", [ANYWHERE, "::1"])
def test_no_socket_paces_by_default(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PACED", kernels_own())
    monkeypatch.setattr(addresses, "UNPACED", ("nonsense", "reno"))
    with closing(tcp_socket(address)) as wire:
        assert control(wire) == "reno"
        assert wire.family == (socket.AF_INET6 if ":" in address else socket.AF_INET)


def test_another_default_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PACED", "something else")
    with closing(tcp_socket(ANYWHERE)) as wire:
        assert control(wire) == kernels_own()


@pytest.mark.parametrize("requested", ["reno", ""])
def test_the_variable_names_the_algorithm(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, requested)
    with closing(tcp_socket(ANYWHERE)) as wire:
        assert control(wire) == (requested or kernels_own())


def test_an_unavailable_algorithm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nonsense")
    with pytest.raises(RendezvousError, match=r"TCP_CONGESTION='nonsense'.* allows .*reno"):
        tcp_socket(ANYWHERE)


@pytest.mark.skipif(kernels_own() == "reno", reason="reno is the kernel's own choice here")
def test_both_ends_of_a_connection_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PACED", kernels_own())
    monkeypatch.setattr(addresses, "UNPACED", ("reno",))
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: join(store, rank, 2), range(2)))
    for some in made:
        assert [control(wire) for pair in some.values() for wire in pair] == ["reno", "reno"]
    close(*made)
