"""The server as a process: torch's client, hostile bytes, slow readers, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
from at_once import at_once
from ports import wait_refused

from nc10d.store import server
from nc10d.store import wire as m
from nc10d.store.hosting import Hosting, host_server, listen

HELLO = m.with_u32(m.VALIDATE, m.MAGIC)


@contextlib.contextmanager
def serving(kind: str = "process", limits: m.Limits | None = None) -> Iterator[Hosting]:
    hosting = host_server("127.0.0.1", 0, kind, limits or m.Limits())
    try:
        yield hosting
    finally:
        hosting.release()


@pytest.fixture
def port() -> Iterator[int]:
    with serving() as hosting:
        yield hosting.port


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(HELLO)
    return sock


def take(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, f"closed after {data!r}"
        data += piece
    return data


def ask(sock: socket.socket, request: bytes, count: int) -> bytes:
    sock.sendall(request)
    return take(sock, count)


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def torch_store(port: int, seconds: float = 20):
    dist = pytest.importorskip("torch.distributed")
    return dist.TCPStore(
        "127.0.0.1", port, None, False, timedelta(seconds=seconds), wait_for_workers=False
    )


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_torchs_client_gets_every_answer_it_expects(kind):
    with serving(kind) as hosting:
        store = torch_store(hosting.port)
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert store.add("n", 3) == 3
        assert store.add("n", -5) == -2
        assert store.get("n") == b"-2"
        assert store.check(["a", "n"])
        assert not store.check(["a", "z"])
        assert store.compare_set("a", "1", "2") == b"2"
        assert store.compare_set("a", "1", "3") == b"2"
        assert store.compare_set("new", "", "v") == b"v"
        assert store.compare_set("none", "x", "v") == b"x"
        store.append("a", "xx")
        assert store.get("a") == b"2xx"
        store.multi_set(["x", "y"], ["1", "2"])
        assert store.multi_get(["x", "y"]) == [b"1", b"2"]
        assert store.num_keys() == 5
        assert store.delete_key("x")
        assert not store.delete_key("x")
        store.wait(["a", "y"], timedelta(seconds=5))
        store.queue_push("q", "v")
        store.queue_push("q", "w")
        assert store.queue_pop("q") == b"v"
        if kind == "process":  # torch holds the GIL in these two calls: a thread could never answer
            assert store.queue_len("q") == 1
            assert set(store.list_keys()) == {"a", "n", "new", "y"}


def test_torchs_client_times_out_and_goes_on(port):
    store = torch_store(port)
    with pytest.raises(RuntimeError, match="wait timeout after 50ms, keys: /never"):
        store.wait(["never"], timedelta(milliseconds=50))
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_torchs_clients_see_each_others_keys_and_wake_each_other(port):
    first, second = torch_store(port), torch_store(port)
    waiter = threading.Thread(target=first.wait, args=(["go"],))
    waiter.start()
    second.set("go", "")
    waiter.join(10)
    assert not waiter.is_alive()
    assert second.clone().get("go") == b""


def test_torchs_barrier_opens(port):
    stores = [torch_store(port) for _ in range(3)]
    if not hasattr(stores[0], "barrier"):
        pytest.skip("torch's Python class has no barrier")
    at_once(*(partial(store.barrier, "b", 3) for store in stores))


BAD = {
    "nothing but noise": b"\xff" * 100,
    "no validate": m.simple(m.GETNUMKEYS),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "unknown kind": HELLO + b"\x63",
    "endless key": HELLO + bytes((m.GET,)) + b"\xff" * 8,
    "long key": HELLO + m.with_key(m.GET, bytes(9000)),
    "add to no number": HELLO + m.with_values(m.SET, b"/w", b"x") + m.with_number(m.ADD, b"/w", 1),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_frame_closes_its_connection_alone(port, what):
    with connect(port) as good, socket.create_connection(("127.0.0.1", port), 20) as bad:
        bad.sendall(BAD[what])
        assert is_closed(bad)
        assert ask(good, m.with_u32(m.PING, 7), 4) == struct.pack("<I", 7)


def test_bytes_may_arrive_singly(port):
    with connect(port) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in m.with_values(m.SET, b"/k", b"v") + m.with_key(m.GET, b"/k"):
            sock.sendall(bytes((byte,)))
        assert take(sock, 9) == m.string(b"v")


def test_a_stalled_reader_delays_no_client_and_gets_everything(port):
    value = os.urandom(8 << 20)
    with connect(port) as slow, connect(port) as quick:
        slow.sendall(m.with_values(m.SET, b"/k", value) + m.with_key(m.GET, b"/k") * 8)
        assert ask(quick, m.with_u32(m.PING, 1), 4) == struct.pack("<I", 1)
        for _ in range(8):
            assert take(slow, 8 + len(value)) == m.string(value)


def test_a_wait_and_its_get_may_travel_in_one_packet(port):
    with connect(port) as waiter, connect(port) as writer:
        waiter.sendall(m.with_keys(m.WAIT, [b"/k"]) + m.with_key(m.GET, b"/k"))
        assert ask(waiter, b"", 0) == b""
        writer.sendall(m.with_values(m.SET, b"/k", b"v"))
        assert take(waiter, 10) == m.STOP_WAITING + m.string(b"v")


def test_a_nonce_that_asks_is_answered_with_the_servers_traits(port):
    with connect(port) as sock:
        asked = m.with_u32(m.PING, m.ASKS | 7)
        assert ask(sock, asked, 4) == struct.pack("<I", m.ASKS | 7 | m.TRAITS)


def test_requests_behind_a_bad_request_are_dropped(port):
    with connect(port) as other, connect(port) as wrong:
        mistake = m.with_value(m.SET, b"/x", b"x") + m.with_number(m.ADD, b"/x", 1)
        wrong.sendall(mistake + m.with_value(m.SET, b"/k", b"v"))
        assert is_closed(wrong)
        assert ask(other, m.with_keys(m.CHECK, [b"/x"]), 1) == m.READY
        assert ask(other, m.with_keys(m.CHECK, [b"/k"]), 1) == m.NOT_READY


def test_a_client_is_served_before_all_requests_behind_anothers_wait_are_executed(monkeypatch):
    monkeypatch.setattr(server, "TURN_SECONDS", 0.0)
    meet = m.with_number(m.BARRIER, b"/b", 2)
    count = m.with_number(m.ADD, b"/n", 1)
    with (
        serving("thread") as hosting,
        connect(hosting.port) as patient,
        connect(hosting.port) as other,
    ):
        patient.sendall(m.with_value(m.SET, b"/come", b"") + meet + count * 100)
        while ask(other, m.with_keys(m.CHECK, [b"/come"]), 1) != m.READY:
            pass
        assert ask(other, meet + count, 1) == m.STOP_WAITING == take(patient, 1)
        (number,) = m.I64.unpack(take(other, 8))
        assert number < 100
        numbers = [m.I64.unpack(take(patient, 8))[0] for _ in range(100)]
        assert numbers == [n for n in range(1, 102) if n != number]


def test_a_waiter_that_disconnects_disturbs_no_client(port):
    with connect(port) as writer:
        with connect(port) as waiter:
            waiter.sendall(m.with_keys(m.WAIT, [b"/k"]))
        writer.sendall(m.with_values(m.SET, b"/k", b"v") + m.with_key(m.GET, b"/k"))
        assert take(writer, 9) == m.string(b"v")


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_the_server_ends_at_once_if_no_client_ever_came(kind):
    with serving(kind) as hosting:
        port = hosting.port
    wait_refused(port)


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_without_owner_it_gives_up_its_port_and_serves_until_the_last_client_has_gone(kind):
    with serving(kind) as hosting:
        sock = connect(hosting.port)
        assert ask(sock, m.with_u32(m.PING, 1), 4)
    with sock:
        assert ask(sock, m.with_u32(m.PING, 2), 4) == struct.pack("<I", 2)
        listen("127.0.0.1", hosting.port).close()
        wait_refused(hosting.port)
        assert ask(sock, m.with_u32(m.PING, 3), 4) == struct.pack("<I", 3)


OWNER = """
import sys, signal
from nc10d.store.hosting import host_server
from nc10d.store.wire import Limits
hosting = host_server("127.0.0.1", 0, "process", Limits())
print(hosting.port, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_server_outlives_a_killed_owner_while_clients_are_connected(number):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert owner.stdout is not None
    port = int(owner.stdout.readline())
    with connect(port) as sock:
        assert ask(sock, m.with_u32(m.PING, 1), 4)
        os.killpg(owner.pid, number)  # as a terminal's Ctrl-C: the whole group
        # End-of-file: the server does not hold its owner's output open.
        assert owner.stdout.read() == b""
        owner.wait()
        owner.stdout.close()
        assert ask(sock, m.with_u32(m.PING, 2), 4) == struct.pack("<I", 2)
    wait_refused(port)


def test_the_module_serves_until_ctrl_c_and_prints_its_address():
    command = [sys.executable, "-m", "nc10d.store", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])
        for _ in range(2):  # it stays when its last client has disconnected
            with connect(port) as sock:
                assert ask(sock, m.with_u32(m.PING, 1), 4)
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 0
