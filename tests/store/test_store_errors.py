"""Errors of a store name the address, the cause and the time tried, and give advice."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clocks import takes

from nc10d.errors import NotANumberError, QueueEmptyError, StoreError, StoreTimeout
from nc10d.store import FileStore, HashStore, PrefixStore, Store, TCPStore, client_connect
from nc10d.store.hosting import listen
from nc10d.store.store_errors import Disconnected

HOST = "127.0.0.1"
TRIED = 0.2


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Yield the port of a listener that calls `answer` for each connection, then closes it."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock:
                        answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)


def refusal(
    host: str, port: int, kind: type[StoreError] = StoreTimeout, tried: float = TRIED
) -> str:
    """Return the error of a client that finds no store there; check the time that it tried."""
    messages: list[str] = []

    def attempt() -> None:
        with pytest.raises(kind) as caught:
            TCPStore(host, port, timeout=tried)
        messages.append(str(caught.value))
        assert f"cannot connect to store {host}:{port}: " in messages[-1]

    if kind is StoreTimeout:
        assert takes(attempt, tried, tried + 0.1)
        told = re.search(r"timed out after ([\d.]+) s", messages[-1])
        assert told is not None
        assert tried <= float(told[1]) <= tried + 0.1
    else:
        attempt()
    return messages[-1]


# ---- connecting ----------------------------------------------------------------------------------


def test_a_refused_connection_advises_to_start_the_server() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    assert "connection refused); start the server" in refusal(HOST, port)


@pytest.mark.parametrize("name", ["nowhere.invalid", "x" * 64])
def test_an_unknown_host_name_advises_to_correct_it(name: str) -> None:
    assert "name is not known here" in refusal(name, 29500, tried=1.0)


def test_a_silent_listener_is_reported_as_frozen_or_no_store() -> None:
    with socket.create_server((HOST, 0)) as mute:
        assert "says nothing: the server is frozen" in refusal(HOST, mute.getsockname()[1])


def test_a_listener_that_closes_every_connection_is_reported_as_no_store() -> None:
    with answering(lambda sock: sock.recv(100)) as port:
        assert "closes every connection" in refusal(HOST, port)


def test_an_attempt_that_the_deadline_cuts_short_does_not_hide_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[float] = set()

    def attempt(_host: str, _port: int, deadline: float, _token: object) -> None:
        if deadline in seen:
            raise TimeoutError
        seen.add(deadline)
        raise Disconnected("reset")

    monkeypatch.setattr(client_connect, "connect_once", attempt)
    assert "closes every connection (reset)" in refusal(HOST, 29500)


def test_a_listener_with_another_protocol_is_an_error_at_once() -> None:
    def like_a_web_server(sock: socket.socket) -> None:
        sock.recv(100)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with answering(like_a_web_server) as port:
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"not a store: its answer begins with b'HTTP'"):
            TCPStore(HOST, port, timeout=20)
        assert time.monotonic() - started < 5


def test_a_host_that_drops_packets_may_be_down_or_behind_a_firewall() -> None:
    # A listener with a full queue behaves so: the kernel drops packets without an answer.
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind((HOST, 0))
        listener.listen(0)
        for _ in range(3):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        assert "does not answer" in refusal(HOST, listener.getsockname()[1])


@pytest.mark.parametrize(
    ("port", "error"), [(0, ValueError), (65536, ValueError), ("1", TypeError)]
)
def test_an_invalid_port_is_the_callers_mistake(port: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="port"):
        TCPStore(HOST, port, timeout=20)


@pytest.mark.parametrize(
    "call",
    [lambda store: store.compare_set("k", "", "v"), lambda store: store.add("k", 1)],
    ids=["compare_set", "add"],
)
def test_the_error_of_an_ended_server_names_the_key(call: Callable[[Store], object]) -> None:
    """An add does not blame the value, which may be no number either."""

    def hello_and_one_answer(sock: socket.socket) -> None:
        sock.sendall(sock.recv(100)[6:10])
        sock.recv(100)

    with answering(hello_and_one_answer) as port:
        store = TCPStore(HOST, port, timeout=20)
        began = time.monotonic()
        closed = rf"{HOST}:{port}, key 'k': the server closed"
        with pytest.raises(StoreError, match=closed) as caught:
            call(store)
        assert not isinstance(caught.value, NotANumberError)
        assert time.monotonic() - began < 5
    with pytest.raises(StoreError, match=rf"{HOST}:{port}, key 'k': the server has ended"):
        call(store)
    store.close()


# ---- listening -----------------------------------------------------------------------------------


def test_the_error_of_a_bind_address_elsewhere_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NC10D_BIND", "203.0.113.1")  # unused: reserved for documentation
    monkeypatch.setenv("NC10D_INSECURE", "1")
    with pytest.raises(StoreError, match=r"from NC10D_BIND.*not an address of this machine"):
        listen(HOST, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "a port is 0 to 65535, not '65536'"),
        (["--port", "http"], "a port is 0 to 65535, not 'http'"),
        (["--max-value", "-1"], "'-1' is not a size such as 64, 4K"),
        (["--max-value", "0"], "'0' is not a size such as 64, 4K"),
        (["--host", "nowhere.invalid"], "store nowhere.invalid:29500: the name"),
    ],
)
def test_the_command_reports_a_mistake_in_one_line(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "nc10d.store", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode in (1, 2)
    assert message in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


# ---- values that are no numbers ------------------------------------------------------------------


def torch_stores(libuv: bool) -> Callable[[Path], contextlib.AbstractContextManager[Store]]:
    @contextlib.contextmanager
    def give(_: Path) -> Iterator[Store]:
        dist = pytest.importorskip("torch.distributed")
        theirs = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False, use_libuv=libuv)
        with contextlib.closing(TCPStore(HOST, theirs.port, timeout=20)) as ours:
            yield ours

    return give


STORES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Store]]] = {
    "tcp": lambda _: contextlib.closing(TCPStore(HOST, is_master=True, timeout=20)),
    "libuv": torch_stores(True),
    "legacy": torch_stores(False),
    "hash": lambda _: contextlib.closing(HashStore()),
    "file": lambda folder: contextlib.closing(FileStore(folder / "store", 1)),
    "prefix": lambda _: contextlib.closing(PrefixStore("p", HashStore())),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with STORES[request.param](tmp_path) as made:
        yield made


@pytest.mark.parametrize("value", ["x", "", "9223372036854775808", "y" * 1000])
def test_adding_to_a_value_that_is_no_number_is_an_error_that_shows_it(
    store: Store, value: str
) -> None:
    store.set("k", value)
    expected = r"key 'k': it holds b'.{0,40}'.*not a decimal number"
    with pytest.raises(NotANumberError, match=expected) as caught:
        store.add("k", 1)
    assert isinstance(caught.value, ValueError)
    assert store.get("k") == value.encode()
    assert store.add("n", 2) == 2


def test_a_barrier_on_a_value_that_is_no_number_is_an_error(store: Store) -> None:
    store.set("k", "x")
    with pytest.raises(NotANumberError, match="key 'k'"):
        store.barrier("k", 1)
    assert store.get("k") == b"x"


def test_errors_name_keys_as_they_were_given(store: Store) -> None:
    """Prefixes, of which those of a world are nc10d's own, are no part of a key in an error."""
    inner = PrefixStore("inner", store)
    inner.set("n", "x")
    inner.set_timeout(0.01)
    for key, call in {
        "k": lambda: inner.get("k"),
        "w": lambda: inner.wait(["w", "n"], 0.01),
        "m": lambda: inner.multi_get(["n", "m"]),
        "n": lambda: inner.add("n", 1),
        "b": lambda: inner.barrier("b", 2, 0.01),
    }.items():
        with pytest.raises(StoreError, match=rf"keys? .*'{key}'") as caught:
            call()
        assert "inner" not in str(caught.value)
    with pytest.raises(ValueError, match=r"prefixes of its stores included, not 90.*'kkk"):
        inner.set("k" * 9000, "x")


@pytest.mark.parametrize("kind", ["tcp", "hash", "file", "prefix"])  # torch's server lacks queues
def test_errors_name_queues_as_they_were_given(kind: str, tmp_path: Path) -> None:
    with STORES[kind](tmp_path) as store:
        inner = PrefixStore("inner", store)
        with pytest.raises(QueueEmptyError, match="the queue 'q' is empty"):
            inner.queue_pop("q", block=False)
        inner.set_timeout(0.01)
        with pytest.raises(StoreTimeout, match="key 'q': "):
            inner.queue_pop("q")


@pytest.mark.parametrize(("amount", "error"), [(1 << 63, ValueError), (1.5, TypeError)])
def test_an_invalid_amount_is_refused_before_anything_is_sent(
    store: Store, amount: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        store.add("n", amount)
    with pytest.raises(error):
        store.barrier("n", amount)
    assert not store.check(["n"])


CLIENT = """
import sys, nc10d
try:
    nc10d.TCPStore(sys.argv[1], 29500, is_master=False, timeout=500)
except nc10d.DistNetworkError as error:
    print(not isinstance(error, TimeoutError), error)
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_loopback_interface_that_is_down_is_told_at_once(host):
    command = ["unshare", "--net"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a network namespace")
    done = subprocess.run(
        [*command, sys.executable, "-c", CLIENT, host], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.startswith("True cannot connect to store"), done.stderr
    assert "the loopback interface of this machine is down" in done.stdout
