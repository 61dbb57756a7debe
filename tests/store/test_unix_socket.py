"""Clients on the server's host use its Unix socket; if they can't, they stay on TCP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from clocks import soon, takes

from nc10d.errors import StoreError, StoreTimeout
from nc10d.store import TCPStore
from nc10d.store import wire as m
from nc10d.store.client_connect import connect_once

HOST = "127.0.0.1"
NOBODY = b"\0nc10d-store-nobody"


@pytest.fixture
def store() -> Iterator[TCPStore]:
    with contextlib.closing(TCPStore(HOST, is_master=True, timeout=20)) as store:
        yield store


def family(port: int) -> int:
    with contextlib.closing(connect_once(HOST, port, time.monotonic() + 20)) as link:
        return link.sock.family


def test_a_client_on_the_servers_host_leaves_tcp(store: TCPStore):
    assert family(store.port) == socket.AF_UNIX


def test_a_variable_keeps_a_client_on_tcp(store: TCPStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NC10D_STORE_TCP", "1")
    assert family(store.port) == socket.AF_INET
    with contextlib.closing(store.clone()) as far:
        far.set("k", "v")
        assert store.get("k") == b"v"


def test_torchs_server_gets_no_request_that_it_does_not_know():
    dist = pytest.importorskip("torch.distributed")
    theirs = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    assert family(theirs.port) == socket.AF_INET


def announce_unix(listener: socket.socket, name: bytes) -> None:
    """Serve a connection: a hello, the name, and a number for every further request."""
    peer, _ = listener.accept()
    with peer:
        hello = peer.recv(1 << 16)
        nonce = m.U32.unpack(hello[6:10])[0] | m.TRAITS
        peer.sendall(m.U32.pack(nonce))
        assert peer.recv(1 << 16) == m.with_key(m.GET, m.UNIX_NAME)
        peer.sendall(m.string(name))
        if peer.recv(1 << 16):
            peer.sendall(m.I64.pack(7))


@contextlib.contextmanager
def claiming(name: bytes) -> Iterator[int]:
    """Yield the port of a server that announces the Unix socket `name`."""
    with socket.create_server((HOST, 0)) as listener:
        server = threading.Thread(target=announce_unix, args=(listener, name))
        server.start()
        yield listener.getsockname()[1]
        server.join(20)


def test_an_unreachable_unix_socket_changes_nothing():
    # A client in another network namespace, through a forwarded port, finds this.
    with claiming(NOBODY) as port, contextlib.closing(TCPStore(HOST, port, timeout=20)) as far:
        assert far.num_keys() == 7


def test_a_silent_unix_socket_changes_nothing():
    # A server without free descriptors behaves so.
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(b"\0nc10d-store-mute")
        mute.listen()

        def ask() -> None:
            with claiming(mute.getsockname()) as port:
                far = TCPStore(HOST, port, timeout=20)
                assert far.num_keys() == 7
                far.close()

        assert takes(ask, 0, 5)


def test_a_send_into_a_full_buffer_times_out_on_time():
    assert soon(0.6, seconds_to_fill)


def seconds_to_fill() -> float:
    """Send more than fits to a stalled server; return the seconds until the error."""
    hold, much = threading.Event(), bytes(16 << 20)

    def stand_still(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(peer.recv(1 << 16)[6:10])
            hold.wait(60)

    with socket.create_server((HOST, 0)) as listener:
        server = threading.Thread(target=stand_still, args=(listener,))
        server.start()
        store = TCPStore(HOST, listener.getsockname()[1], timeout=20)
        store.set_timeout(0.3)
        begin = time.monotonic()
        with pytest.raises(StoreTimeout, match="'big'"):
            store.set("big", much)
        took = time.monotonic() - begin
        hold.set()
        server.join(20)
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.set("k", "v")
    assert took >= 0.3
    return took


def test_a_burst_of_sets_is_followed_by_later_requests(store: TCPStore):
    with contextlib.closing(store.clone()) as other:
        for n in range(20_000):
            store.set("n", str(n))
        assert store.get("n") == b"19999"
        assert other.get("n") == b"19999"
