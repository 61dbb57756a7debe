"""A store with a token serves clients that know it; unproven connections cost little."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nc10d.auth.admission import UNPROVEN_SECONDS
from nc10d.auth.handshake import HandshakeCaller, Sealer
from nc10d.errors import StoreError, StoreTimeout
from nc10d.store import TCPStore
from nc10d.store import wire as m
from nc10d.store.auth_server import STORE_INTRODUCTION
from nc10d.store.server import MOST_UNPROVEN
from nc10d.store.table import Table

HOST = "127.0.0.1"
TOKEN = b"t" * 32
GENEROUS = 30.0


@pytest.fixture(params=["process", "thread"])
def store(request: pytest.FixtureRequest) -> Iterator[TCPStore]:
    with contextlib.closing(
        TCPStore(HOST, 0, is_master=True, server=request.param, token=TOKEN)
    ) as master:
        yield master


def client(port: int, token: bytes | None = TOKEN, timeout: float = GENEROUS) -> TCPStore:
    return TCPStore(HOST, port, timeout=timeout, token=token)


@pytest.mark.parametrize("tcp", ["", "1"])
def test_a_client_with_the_token_is_served(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, tcp: str
) -> None:
    monkeypatch.setenv("NC10D_STORE_TCP", tcp)
    big = os.urandom(3 << 20)
    with (
        contextlib.closing(client(store.port)) as first,
        contextlib.closing(first.clone()) as second,
    ):
        first.set("k", big)
        assert second.get("k") == big
        second.multi_set([str(n) for n in range(300)], ["v"] * 300)
        assert first.multi_get([str(n) for n in range(300)]) == [b"v"] * 300
        woken = threading.Thread(target=first.get, args=("later",))
        woken.start()
        second.set("later", "v")
        woken.join(GENEROUS)
        assert not woken.is_alive()


def test_a_cancelled_wait_leaves_the_frames_in_step(store: TCPStore) -> None:
    with contextlib.closing(client(store.port)) as first:
        for _ in range(3):
            with pytest.raises(StoreTimeout, match="'absent'"):
                first.wait(["absent"], 0.05)
            assert first.add("n", 1) > 0


@pytest.mark.parametrize(("server", "token"), [(TOKEN, None), (None, TOKEN), (TOKEN, b"T" * 32)])
def test_a_client_with_another_token_or_none_is_told_at_once(
    server: bytes | None, token: bytes | None
) -> None:
    with contextlib.closing(TCPStore(HOST, 0, is_master=True, token=server)) as store:
        begun = time.monotonic()
        with pytest.raises(StoreError, match=r"token.*NC10D_TOKEN_FILE") as caught:
            client(store.port, token)
        assert not isinstance(caught.value, StoreTimeout)
        assert time.monotonic() - begun < GENEROUS / 2
        # Those who wait for that client learn of it.
        assert store.get(m.REFUSED) == HOST.encode()


def test_the_token_is_on_no_command_line() -> None:
    with contextlib.closing(TCPStore(HOST, 0, is_master=True, token=TOKEN)):
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read()
                assert TOKEN not in words
                assert TOKEN.hex().encode() not in words


# ---- unproven connections ------------------------------------------------------------------------

Peer = Callable[[socket.socket, random.Random], object]


def garbage(sock: socket.socket, chance: random.Random) -> None:
    sock.sendall(chance.randbytes(chance.randint(1, 2000)))


def huge_length(sock: socket.socket, chance: random.Random) -> None:
    sock.sendall(m.with_u32(m.VALIDATE, m.MAGIC) + bytes((m.SET,)) + b"\xff" * 100)


def torchs(sock: socket.socket, chance: random.Random) -> None:
    sock.sendall(m.with_u32(m.VALIDATE, m.MAGIC) + m.with_u32(m.PING, 7))


def idle(sock: socket.socket, chance: random.Random) -> None:
    pass


def partial_hello(sock: socket.socket, chance: random.Random) -> None:
    hello = HandshakeCaller(TOKEN, STORE_INTRODUCTION).hello
    sock.sendall(hello[: chance.randrange(len(hello))])


def no_proof(sock: socket.socket, chance: random.Random) -> None:
    sock.sendall(HandshakeCaller(bytes(32), STORE_INTRODUCTION).hello)


def wrong_proof(sock: socket.socket, chance: random.Random) -> None:
    sock.sendall(HandshakeCaller(bytes(32), STORE_INTRODUCTION).hello + bytes(32))


def hasty(sock: socket.socket, chance: random.Random) -> None:
    sock.sendall(Sealer(bytes(32)).seal(m.with_u32(m.VALIDATE, m.MAGIC)))


def closed(sock: socket.socket, chance: random.Random) -> None:
    sock.close()


UNPROVEN: list[Peer] = [
    garbage, huge_length, torchs, idle, partial_hello, no_proof, wrong_proof, hasty, closed,
]  # fmt: skip


def until_closed(sock: socket.socket) -> float:
    """Return when the other side closed the connection."""
    sock.settimeout(GENEROUS)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return time.monotonic()


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def server_of(port: int) -> int:
    """Return the process that has the store's listening socket."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"server_process.py" in file.read() and listens(int(pid), port):
                return int(pid)
    raise AssertionError("there is no such server")


def listens(pid: int, port: int) -> bool:
    with open(f"/proc/{pid}/net/tcp") as table:
        rows = [line.split() for line in table]
    inodes = {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    links = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    return any(f"socket:[{inode}]" in links for inode in inodes)


@contextlib.contextmanager
def asked_meanwhile(port: int) -> Iterator[list[float]]:
    """Let a client with the token call all the time; yield the seconds that each call took."""
    took: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with contextlib.closing(client(port)) as honest:
            while not over.is_set():
                begun = time.monotonic()
                honest.add("n", 1)
                took.append(time.monotonic() - begun)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join(GENEROUS)


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_unproven_connections_are_closed_in_time_and_cost_little(count: int) -> None:
    chance = random.Random(count)
    with contextlib.closing(TCPStore(HOST, 0, is_master=True, token=TOKEN)) as store:
        pid = server_of(store.port)
        before = resident(pid)
        late: list[float] = []
        with asked_meanwhile(store.port) as took:
            for first in range(0, count, 200):
                late += visits(store.port, range(first, min(count, first + 200)), chance)
        assert resident(pid) - before <= 16 << 20
        assert sorted(store.list_keys()) == ["n", m.REFUSED]
    # The server closes all of them; most as soon as their time is over, or before.
    assert max(late) < GENEROUS
    assert statistics.median(late) < UNPROVEN_SECONDS + 1.0
    assert len(took) > 10, "clients with the token are served meanwhile"
    assert statistics.median(took) < UNPROVEN_SECONDS / 2, "and not after an unproven connection"


def visits(port: int, numbers: range, chance: random.Random) -> list[float]:
    """Open unproven connections at once; return the seconds until each was closed."""
    with contextlib.ExitStack() as stack:
        socks = []
        for number in numbers:
            sock = stack.enter_context(socket.create_connection((HOST, port), GENEROUS))
            came = time.monotonic()
            with contextlib.suppress(ConnectionError):
                UNPROVEN[number % len(UNPROVEN)](sock, chance)
            if sock.fileno() >= 0:
                socks.append((came, sock))
        return [until_closed(sock) - came for came, sock in socks]


@pytest.mark.slow
def test_a_slow_handshake_has_no_more_time_than_an_idle_connection(store: TCPStore) -> None:
    hello = HandshakeCaller(TOKEN, STORE_INTRODUCTION).hello
    came = time.monotonic()
    with socket.create_connection((HOST, store.port), GENEROUS) as sock:
        sock.settimeout(0.2)
        for byte in hello[:-1]:  # for 16 seconds
            try:
                sock.sendall(bytes([byte]))
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            raise AssertionError("the server read for as long as the client sent")
        assert time.monotonic() - came >= UNPROVEN_SECONDS


def test_a_flood_displaces_its_oldest_connections_and_not_clients() -> None:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(
            contextlib.closing(TCPStore(HOST, 0, is_master=True, token=TOKEN))
        )
        pid = server_of(store.port)
        for _ in range(1500):
            stack.enter_context(socket.create_connection((HOST, store.port), GENEROUS))
        with contextlib.closing(client(store.port)) as honest:
            honest.set("k", "v")
            assert honest.get("k") == b"v"
            assert len(os.listdir(f"/proc/{pid}/fd")) < MOST_UNPROVEN + 20


@pytest.mark.parametrize("token", [b"", b"short", bytes(31), bytes(33), "t" * 32])
def test_a_malformed_token_is_refused(token: Any) -> None:
    """With an empty token, a server on any address would accept every client."""
    with pytest.raises((TypeError, ValueError), match="a token"):
        TCPStore("0.0.0.0", 0, is_master=True, token=token)


# ---- requests of a client ------------------------------------------------------------------------

REQUESTS = [
    m.with_value(m.SET, b"/k", b"value"),
    m.with_values(m.COMPARE_SET, b"/k", b"", b"v"),
    m.with_key(m.GET, b"/k"),
    m.with_number(m.ADD, b"/n", 3),
    m.with_keys(m.CHECK, [b"/k", b"/l"]),
    m.with_keys(m.WAIT, [b"/k"]) + m.with_key(m.GET, b"/k"),
    m.with_pairs([(b"/k", b"v"), (b"/l", b"w")]),
    m.with_number(m.BARRIER, b"/b", 2),
]


@pytest.mark.parametrize("rounds", [20_000, pytest.param(2_000_000, marks=pytest.mark.long)])
def test_mutated_requests_end_their_connection_or_mean_something(rounds: int) -> None:
    """Parser and table, joined as in the server; without a token any peer can send these bytes."""
    chance = random.Random(rounds)
    hello = m.with_u32(m.VALIDATE, m.MAGIC)
    limits = m.Limits(total=1 << 20)
    for number in range(rounds):
        if number % 1000 == 0:
            table = Table(limits)
        parser = m.Parser(limits)
        wire = hello + mutated(b"".join(chance.choices(REQUESTS, k=2)), chance)
        cut = chance.randrange(len(wire))
        with contextlib.suppress(m.BadFrame):
            for piece in (wire[:cut], wire[cut:]):
                for request in parser.feed(piece):
                    table.apply(request, parser)
                for request in table.held(parser):
                    table.apply(request, parser)
        assert len(parser.held) <= len(wire)
        assert table.values.nbytes <= limits.total
        table.forget(parser)


def mutated(wire: bytes, chance: random.Random) -> bytes:
    changed = bytearray(wire)
    for _ in range(chance.randint(0, 3)):
        at = chance.randrange(len(changed))
        changed[at] = chance.choice((0, 1, 255, changed[at] ^ (1 << chance.randrange(8))))
    return bytes(changed[: chance.randint(1, len(changed))])
