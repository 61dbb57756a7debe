"""A server holds a bounded memory and a bounded number of connections, whatever its clients do."""

from __future__ import annotations

import contextlib
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from nc10d.errors import StoreError, StoreTimeout
from nc10d.store import TCPStore
from nc10d.store import server as server_module
from nc10d.store import wire as m
from nc10d.store.server import Server
from nc10d.store.table import Table

HOST = "127.0.0.1"
HELLO = m.with_u32(m.VALIDATE, m.MAGIC)
BRIEF, GENEROUS = 0.2, 20.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """A store whose server gives connections little time."""
    monkeypatch.setattr(Server, "_proof_seconds", BRIEF)
    monkeypatch.setattr(server_module, "STALL_SECONDS", BRIEF)
    with served() as store:
        yield store


def served(**limits: int) -> contextlib.closing[TCPStore]:
    return contextlib.closing(
        TCPStore(HOST, is_master=True, server="thread", limits=m.Limits(**limits), timeout=GENEROUS)
    )


def seconds_until_closed(sock: socket.socket) -> float:
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return time.monotonic() - begun


# ---- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", HELLO[:1]], ids=["nothing", "half a greeting"])
def test_a_connection_that_does_not_greet_is_closed(impatient: TCPStore, sent: bytes) -> None:
    with socket.create_connection((HOST, impatient.port), GENEROUS) as sock:
        sock.sendall(sent)
        assert BRIEF / 2 < seconds_until_closed(sock) < GENEROUS


def test_a_request_that_stops_halfway_is_closed(impatient: TCPStore) -> None:
    request = m.with_value(m.SET, b"/k", b"value")
    with socket.create_connection((HOST, impatient.port), GENEROUS) as half:
        half.sendall(HELLO + request[:-1])
        assert seconds_until_closed(half) < GENEROUS


def test_a_slow_request_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    request, stall = m.with_value(m.SET, b"/k", b"value"), 3.0
    monkeypatch.setattr(server_module, "STALL_SECONDS", stall)
    with served() as store, socket.create_connection((HOST, store.port), GENEROUS) as slow:
        slow.sendall(HELLO)
        for byte in request:
            slow.sendall(bytes((byte,)))
            time.sleep(1.3 * stall / len(request))  # longer than the limit in all
        assert store.wait(["k"], GENEROUS) is None
        assert store.get("k") == b"value"


def test_an_idle_client_stays(impatient: TCPStore) -> None:
    with socket.create_connection((HOST, impatient.port), GENEROUS) as sock:
        sock.sendall(HELLO)
        sock.settimeout(4 * BRIEF)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.sendall(m.with_u32(m.PING, 7))
        assert sock.recv(4) == m.U32.pack(7)


def test_a_client_beyond_the_bound_learns_why() -> None:
    with served(clients=2) as store, contextlib.closing(store.clone()):
        with pytest.raises(StoreTimeout, match="no room for more clients"):
            TCPStore(HOST, store.port, timeout=BRIEF)
        store.set("k", "v")
        assert store.get("k") == b"v"


# ---- memory --------------------------------------------------------------------------------------

KEYS = [b"/%020d" % number for number in range(5000)]
FILL: dict[str, Callable[[Table], None]] = {
    "keys": lambda table: each(table, [(m.SET, key, b"") for key in KEYS]),
    "queues": lambda table: each(table, [(m.QUEUE_PUSH, key, b"") for key in KEYS]),
    "queue": lambda table: each(table, [(m.QUEUE_PUSH, b"/q", b"v" * 9) for _ in KEYS]),
    "wait": lambda table: each(table, [(m.WAIT, KEYS)]),
    "waits": lambda table: each(table, [(m.WAIT, [key]) for key in KEYS], clients=len(KEYS)),
    "waits with requests behind": lambda table: each(
        table, [(m.WAIT, [b"/w"])] * 100 + [(m.SET, key, b"v" * 50) for key in KEYS], clients=100
    ),
    "barriers": lambda table: each(table, [(m.BARRIER, key, 2) for key in KEYS], clients=len(KEYS)),
}


def each(table: Table, requests: list[m.Request], clients: int = 1) -> None:
    for number, request in enumerate(requests):
        table.apply(request, number % clients)


@pytest.mark.parametrize("what", FILL)
def test_the_counted_memory_is_no_less_than_the_real_memory(what: str) -> None:
    FILL[what](Table())  # whatever the interpreter keeps for good
    table = Table()
    tracemalloc.start()
    try:
        FILL[what](table)
        real, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert real <= table.values.nbytes + sum(map(len, KEYS)) + (64 << 10)
    for client in range(len(KEYS)):
        table.forget(client)
    if what.startswith("wait"):
        assert table.values.nbytes == 0


@pytest.mark.parametrize("what", FILL)
def test_no_kind_of_entry_grows_beyond_the_bound(what: str) -> None:
    table = Table(m.Limits(total=100_000))
    FILL[what](table)
    assert table.values.nbytes <= 100_000


def test_requests_behind_waits_stay_bounded_when_the_waits_end_one_by_one() -> None:
    table, held = Table(), [(m.WAIT, [b"/%d" % number]) for number in range(10_000)]
    closed = 0
    for number, request in enumerate(held):
        closed += (0, None) in table.apply(request, 0)
        if number % 2:
            table.apply((m.SET, b"/%d" % (number // 2), b""), 1)
            for again in table.held(0):
                closed += (0, None) in table.apply(again, 0)
    assert closed, "a client whose waits come faster than they end"


@pytest.mark.parametrize("first", [b"", m.with_keys(m.WAIT, [b"/go"])], ids=["at once", "held"])
def test_replies_are_made_no_faster_than_their_client_reads_them(first: bytes) -> None:
    with served(total=8 << 20) as store:
        store.multi_set([str(number) for number in range(5000)], [""] * 5000)
        reply = len(m.strings([b"/%d" % number for number in range(5000)]))
        with socket.create_connection((HOST, store.port), GENEROUS) as sock:
            sock.sendall(HELLO + first + m.simple(m.LIST_KEYS) * 500)  # 34 MB of replies
            assert store.num_keys() == 5000  # the server has read the requests
            store.set("go", "")
            assert store.get("go") == b""
            left = 500 * reply
            while left > 0:
                piece = sock.recv(1 << 20)
                assert piece, "the server has closed the connection"
                left -= len(piece)


def test_a_call_beyond_the_bound_is_a_typed_error() -> None:
    with served(total=10_000) as store:
        with pytest.raises(StoreError, match="beyond its bounds"):
            store.wait([f"{number:0100}" for number in range(1000)])
        store.set("k", "v")
        assert store.get("k") == b"v"
