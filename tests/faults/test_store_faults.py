"""A store that is absent, mute, frozen or dead, or sends half an answer: every call ends on time.

So does a call at Ctrl-C. The best of a few tries must end within `SOON` of the timeout, the death
or the signal; every try must end within `LATE`, because other tests may use the cores.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from clocks import soon
from ports import free_port

from nc10d.errors import StoreError, StoreTimeout
from nc10d.store import FileStore, HashStore, Store, TCPStore
from nc10d.store import wire as m

HOST = "127.0.0.1"
TRIES, SOON, LATE = 3, 0.1, 20.0
LIMIT = 0.1

Call = Callable[[Store], object]
# Calls that wait for another client, and calls that only need an answer.
WAITS: dict[str, Call] = {
    "get": lambda store: store.get("absent"),
    "wait": lambda store: store.wait(["there", "absent"]),
    "multi_get": lambda store: store.multi_get(["there", "absent"]),
    "queue_pop": lambda store: store.queue_pop("absent"),
    "barrier": lambda store: store.barrier("absent but for who waits", 99),
}
ASKS: dict[str, Call] = {
    "add": lambda store: store.add("absent", 1),
    "check": lambda store: store.check(["absent"]),
    "compare_set": lambda store: store.compare_set("absent", "", "v"),
    "delete_key": lambda store: store.delete_key("absent"),
    "queue_len": lambda store: store.queue_len("absent"),
    "queue_pop now": lambda store: store.queue_pop("absent", block=False),
    "num_keys": lambda store: store.num_keys(),
    "list_keys": lambda store: store.list_keys(),
}
CALLS = WAITS | ASKS
KEYLESS = ("num_keys", "list_keys")


class Took:
    """Seconds past its due time of each try of a call."""

    def __init__(self) -> None:
        self.late: list[float] = []

    def check(self, late: float) -> None:
        assert -0.001 <= late < LATE
        self.late.append(late)

    def must_be_soon(self) -> None:
        assert min(self.late) < SOON, self.late


def times_out(call: Callable[[], object], expected: str, limit: float = LIMIT) -> float:
    """Return how long after its `limit` the call raised a timeout with the text `told`."""
    started = time.monotonic()
    with pytest.raises(StoreTimeout) as caught:
        call()
    late = time.monotonic() - started - limit
    assert -0.001 <= late < LATE
    assert expected in str(caught.value)
    return late


@contextlib.contextmanager
def server_process() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Yield port and process of a server that can be stopped and killed."""
    command = [sys.executable, "-m", "nc10d.store", "--host", HOST, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline().rsplit(":", 1)[1]), child
        finally:
            child.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    with server_process() as pair:
        yield pair


@contextlib.contextmanager
def client(port: int, limit: float = 20) -> Iterator[TCPStore]:
    with contextlib.closing(TCPStore(HOST, port, timeout=limit)) as store:
        yield store


# ---- absent --------------------------------------------------------------------------------------


def test_a_master_without_its_clients_names_their_number() -> None:
    limit = 2.0  # its server has to start within it
    making = partial(TCPStore, HOST, 0, 3, is_master=True, timeout=limit)
    assert soon(SOON, lambda: times_out(making, "1/3 clients joined", limit))


# ---- mute, and answers half ----------------------------------------------------------------------

# The answers of calls; a server that sends half an answer stops somewhere within.
ANSWERS = {
    "get": m.STOP_WAITING + m.string(b"value"),
    "multi_get": m.STOP_WAITING + m.string(b"value") * 2,
    "queue_pop": m.STOP_WAITING + m.I64.pack(1) + m.string(b"value"),
    "compare_set": m.string(b"value"),
    "list_keys": m.strings([b"/a", b"/b"]),
    **dict.fromkeys(("add", "delete_key", "queue_len", "num_keys"), m.I64.pack(1)),
}


@contextlib.contextmanager
def answering(part: bytes) -> Iterator[int]:
    """Yield the port of a server that answers the first call of each client with `part`."""
    with socket.create_server((HOST, 0)) as listener, contextlib.ExitStack() as held:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock = held.enter_context(listener.accept()[0])
                    sock.sendall(sock.recv(100)[6:10])
                    sock.recv(1000)
                    sock.sendall(part)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)


@pytest.mark.parametrize("name", CALLS)
def test_a_server_that_falls_silent_is_a_timeout_that_names_store_and_key(name: str) -> None:
    assert soon(SOON, partial(half_answered, name, b""))


@pytest.mark.parametrize("name", ANSWERS)
def test_a_partial_answer_is_a_timeout_wherever_it_stops(name: str) -> None:
    answer = ANSWERS[name]
    for at in sorted({1, len(answer) // 2, len(answer) - 1}):
        assert soon(SOON, partial(half_answered, name, answer[:at])), at


def half_answered(name: str, part: bytes) -> float:
    """Return how late a call's timeout is, if the server answers only `part`."""
    with answering(part) as port, client(port) as store:
        store.set_timeout(LIMIT)
        expected = f"{HOST}:{port}" if name in KEYLESS else "'absent"
        return times_out(lambda: CALLS[name](store), expected)


# ---- frozen --------------------------------------------------------------------------------------


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a child process until the block ends."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("name", CALLS)
def test_a_frozen_server_is_a_timeout_and_thawed_it_serves_on(
    server: tuple[int, subprocess.Popen[str]], name: str
) -> None:
    port, child = server
    took = Took()
    with client(port) as store:
        for number in range(TRIES):
            store.set_timeout(LIMIT)
            expected = f"{HOST}:{port}" if name in KEYLESS else "'absent"
            with frozen(child.pid):
                took.check(times_out(lambda: CALLS[name](store), expected))
            store.set_timeout(20)
            store.set("there", str(number))
            assert store.get("there") == str(number).encode()
            store.delete_key("absent")
    took.must_be_soon()


def test_a_frozen_server_is_no_more_to_be_joined(server: tuple[int, subprocess.Popen[str]]) -> None:
    port, child = server
    took = Took()
    with client(port) as store, frozen(child.pid):
        for _ in range(TRIES):
            took.check(times_out(lambda: TCPStore(HOST, port, timeout=LIMIT), f"{HOST}:{port}"))
        took.must_be_soon()
        big = bytes(8 << 20)
        store.set_timeout(LIMIT)
        assert soon(SOON, lambda: times_out(lambda: store.set("big", big), "'big'"), TRIES)


# ---- dead ----------------------------------------------------------------------------------------


class Killed:
    """A call in a separate thread: its error, and when it was raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self.at = 0.0
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except StoreError as error:
            self.error, self.at = error, time.monotonic()

    def ended(self) -> tuple[BaseException | None, float]:
        self._thread.join(20)
        return self.error, self.at


def test_a_killed_server_ends_every_wait_at_once_with_the_key() -> None:
    assert soon(SOON, kill_a_server)


def kill_a_server() -> float:
    """Return how long after its server's death the last of many calls raised its error."""
    took = Took()
    with server_process() as (port, child), contextlib.ExitStack() as stack:
        stores = [stack.enter_context(client(port)) for _ in WAITS]
        for store in stores:
            store.set("there", "v")
        # A frozen server never answers, so that all calls are pending when it dies.
        asking = [stack.enter_context(client(port)) for _ in ASKS]
        under_way = [
            Killed(lambda s=s, c=c: c(s)) for s, c in zip(stores, WAITS.values(), strict=True)
        ]
        with frozen(child.pid):
            under_way += [
                Killed(lambda s=s, c=c: c(s)) for s, c in zip(asking, ASKS.values(), strict=True)
            ]
            killed = time.monotonic()
            child.kill()
        for name, one in zip(CALLS, under_way, strict=True):
            error, at = one.ended()
            assert isinstance(error, StoreError)
            assert not isinstance(error, StoreTimeout)
            assert (f"{HOST}:{port}" if name in KEYLESS else "'absent") in str(error)
            took.check(at - killed)
        started = time.monotonic()
        with pytest.raises(StoreError, match="nobody listens there any more"):
            stores[0].get("there")
        took.check(time.monotonic() - started)
    return max(took.late)


# ---- Ctrl-C --------------------------------------------------------------------------------------


def interrupted(call: Callable[[], object], after: float = 0.05) -> float:
    """Return how long after a Ctrl-C, which comes `after` seconds, the call raised it."""
    sent = 0.0
    me = threading.get_ident()

    def send() -> None:
        nonlocal sent
        sent = time.monotonic()
        signal.pthread_kill(me, signal.SIGINT)

    timer = threading.Timer(after, send)

    def call_meanwhile() -> None:
        timer.start()
        call()

    try:
        with pytest.raises(KeyboardInterrupt):
            call_meanwhile()
        return time.monotonic() - sent
    finally:
        timer.join()


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_ctrl_c_ends_a_wait_and_the_store_goes_on(
    server: tuple[int, subprocess.Popen[str]], tmp_path: Path, kind: str, name: str
) -> None:
    stores: dict[str, Callable[[], Store]] = {
        "tcp": lambda: TCPStore(HOST, server[0], timeout=20),
        "file": lambda: FileStore(tmp_path / "store", 1),
        "hash": HashStore,
    }
    took = Took()
    with contextlib.closing(stores[kind]()) as store:
        for number in range(TRIES):
            took.check(interrupted(lambda: WAITS[name](store)))
            store.set("there", str(number))
            assert store.get("there") == str(number).encode()
        store.delete_key("absent")
    took.must_be_soon()


@pytest.mark.parametrize("name", ASKS)
def test_ctrl_c_ends_a_call_that_a_frozen_server_does_not_answer(
    server: tuple[int, subprocess.Popen[str]], name: str
) -> None:
    port, child = server
    took = Took()
    with client(port) as store:
        for _ in range(TRIES):
            # Interrupted, a store connects anew, which a frozen server lets it do up to a point.
            with frozen(child.pid):
                took.check(interrupted(lambda: ASKS[name](store)))
            assert store.check([])
        store.delete_key("absent")
    took.must_be_soon()


def test_ctrl_c_ends_a_call_that_finds_no_room(server: tuple[int, subprocess.Popen[str]]) -> None:
    port, child = server
    with client(port) as store, frozen(child.pid):
        late = interrupted(lambda: store.set("big", bytes(8 << 20)))
    assert late < LATE


def test_ctrl_c_ends_every_way_to_join() -> None:
    absent = free_port()
    with socket.create_server((HOST, 0)) as mute:
        mute_port = mute.getsockname()[1]
        ways: list[Callable[[], object]] = [
            lambda: TCPStore(HOST, absent, timeout=20),
            lambda: TCPStore(HOST, mute_port, timeout=20),
            lambda: TCPStore(HOST, 0, 2, is_master=True, timeout=20),
        ]
        for way in ways:  # it waits by then: amid its clean-up, finalizers would close its socket
            assert soon(SOON, partial(interrupted, way, after=0.5)), way
