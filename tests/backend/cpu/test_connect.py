"""Connections between hosts: with strangers at the port, and with ranks that are missing."""

from __future__ import annotations

import gc
import hmac
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from peer_sockets import close, endpoints, join

from nc10d.auth.admission import UNPROVEN_SECONDS
from nc10d.auth.handshake import PROOF_BYTES, HandshakeCaller, Introduction, group_digest
from nc10d.backend.cpu.transport import addresses
from nc10d.backend.cpu.transport.connect import PeerSockets, connect
from nc10d.base.deadline import Deadline
from nc10d.errors import AuthError, PeerLost, RendezvousError
from nc10d.store import HashStore


def endpoint(store: HashStore, rank: int) -> tuple[str, int]:
    store.wait([f"endpoint/world/{rank}"], 10.0)
    address, port, _ = json.loads(store.get(f"endpoint/world/{rank}"))
    return address, port


def exchange(made: list[PeerSockets]) -> None:
    """Send on every socket: the bytes must arrive at the other end of the same purpose."""
    for rank, some in enumerate(made):
        for peer, pair in some.items():
            for purpose, wire in enumerate(pair):
                wire.settimeout(5.0)
                wire.sendall(bytes([rank, peer, purpose]))
    for rank, some in enumerate(made):
        for peer, pair in some.items():
            for purpose, wire in enumerate(pair):
                assert wire.recv(3) == bytes([peer, rank, purpose])


@pytest.mark.parametrize("size", [2, 3, 9])
def test_each_pair_has_a_connection_for_each_purpose(size: int) -> None:
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(lambda rank: join(store, rank, size), range(size)))
    exchange(made)
    close(*made)


def silent(wire: socket.socket) -> None:
    wire.shutdown(socket.SHUT_WR)


def garbage(wire: socket.socket) -> None:
    wire.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)


def wrong_secret(wire: socket.socket) -> None:
    caller = HandshakeCaller(b"0" * 32, Introduction(1, 0, 0, group_digest("world")))
    wire.sendall(caller.hello + bytes(PROOF_BYTES))


def idle(wire: socket.socket) -> None:
    pass


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_strangers_at_a_forming_port_are_not_kept_and_not_joined(count: int) -> None:
    store = HashStore()
    gc.collect()  # objects of other tests are freed now, not during the test
    held = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(join, store, 0, 3, 300.0)
        second = pool.submit(join, store, 1, 3, 300.0)
        where = endpoint(store, 0)
        store.set("endpoint/world/2", json.dumps(["127.0.0.1", 1, "00" * 32]))  # it is to come yet
        for number in range(count):
            with socket.create_connection(where, 60.0) as wire, suppress(ConnectionError):
                (silent, garbage, wrong_secret, idle)[number % 4](wire)
        store.delete_key("endpoint/world/2")
        third = pool.submit(join, store, 2, 3, 300.0)
        made = [rank.result() for rank in (first, second, third)]
    exchange(made)
    close(*made)
    assert len(os.listdir("/proc/self/fd")) == held


def test_strangers_are_turned_away_before_any_other_rank_has_come() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, store, 0, 2, 60.0)
        for _ in range(3):
            with socket.create_connection(endpoint(store, 0), 20.0) as wire:
                garbage(wire)
                with suppress(ConnectionError):
                    assert wire.recv(1) == b"", "it was cut off"
        assert not first.done()
        made = [join(store, 1, 2, 60.0), first.result()][::-1]
    exchange(made)
    close(*made)


@pytest.mark.slow
def test_an_idle_stranger_is_cut_off_while_the_ranks_still_come() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, store, 0, 2, 60.0)
        where = endpoint(store, 0)
        store.set("endpoint/world/1", json.dumps(["127.0.0.1", 1, "00" * 32]))
        with socket.create_connection(where, 60.0) as wire:
            came = time.monotonic()
            assert wire.recv(1) == b"", "it was cut off"
            assert time.monotonic() - came > UNPROVEN_SECONDS - 0.1
            assert not first.done()
        store.delete_key("endpoint/world/1")
        second = pool.submit(join, store, 1, 2, 60.0)
        made = [first.result(), second.result()]
    exchange(made)
    close(*made)


@pytest.mark.slow
def test_a_network_that_is_gone_for_five_seconds_ends_no_handshake() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, store, 0, 2, 60.0)
        where = endpoint(store, 0)
        store.set("endpoint/world/1", json.dumps(["127.0.0.1", 1, "00" * 32]))
        secret = bytes.fromhex(json.loads(store.get("endpoint/world/0"))[2])
        key, made = hmac.digest(b"", secret, "sha256"), []
        for purpose in range(2):
            made.append(socket.create_connection(where, 60.0))
            caller = HandshakeCaller(key, Introduction(1, 0, purpose, group_digest("world")))
            made[-1].sendall(caller.hello)
            threading.Event().wait(5.0 if purpose else 0.0)
            made[-1].sendall(caller.feed(made[-1].recv(caller.wants, socket.MSG_WAITALL)))
        exchange([first.result(), {0: made}])
    close(first.result(), {0: made})


def test_ranks_with_different_tokens_do_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setenv("NC10D_TOKEN", "a" * 64)
        first = pool.submit(join, store, 0, 2, 0.5)
        endpoint(store, 0)
        monkeypatch.setenv("NC10D_TOKEN", "b" * 64)
        with pytest.raises(
            RendezvousError, match=r"rank 0: it does not know the key .*NC10D_TOKEN"
        ):
            join(store, 1, 2)
        told = r"timed out after 0\.5 s at .*: no connection to rank 1 on"
        with pytest.raises(RendezvousError, match=told):
            first.result()


def test_no_rank_listens_afterwards() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: join(store, rank, 2), range(2)))
    for rank in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(endpoint(store, rank))
    close(*made)


def test_missing_ranks_are_named_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(RendezvousError, match="ranks 1, 2 on another host did not"):
        join(HashStore(), 0, 3, timeout=0.2)
    assert time.monotonic() - start < 5.0


def test_the_check_ends_the_wait() -> None:
    def check() -> None:
        raise PeerLost("rank 1 is gone")

    with pytest.raises(PeerLost):
        connect(endpoints(HashStore(), 0), [1], 2, Deadline.after(30.0), check)


def test_an_address_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_SOCKET_ADDRESS", "127.0.0.2")
    assert addresses.own_address(HashStore()) == "127.0.0.2"
    monkeypatch.delenv("NC10D_SOCKET_ADDRESS")
    monkeypatch.setenv("NC10D_SOCKET_IFNAME", "lo")
    assert addresses.own_address(HashStore()) == "127.0.0.1"
    monkeypatch.setenv("NC10D_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(RendezvousError, match="'nosuch0' has no address here"):
        addresses.own_address(HashStore())


def test_an_address_that_is_not_mine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_SOCKET_ADDRESS", "192.0.2.1")
    with pytest.raises(AuthError, match="the port of rank 0 at 192"):
        join(HashStore(), 0, 2)
    monkeypatch.setenv("NC10D_INSECURE", "1")
    with pytest.raises(RendezvousError, match=r"can't listen on 192\.0\.2\.1"):
        join(HashStore(), 0, 2)
