"""A store's server and its owner: clients survive terminals, forks and a frozen peer."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from clocks import soon, takes

from nc10d.errors import AuthError, StoreError, StoreTimeout
from nc10d.store import TCPStore
from nc10d.store import wire as m


@contextlib.contextmanager
def owned(**options: object) -> Iterator[TCPStore]:
    with contextlib.closing(TCPStore("127.0.0.1", is_master=True, **options)) as store:
        yield store


@pytest.fixture
def store() -> Iterator[TCPStore]:
    with owned() as store:
        yield store


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_tenants_share_a_server(store: TCPStore):
    tenant = TCPStore("127.0.0.1", store.port, is_master=True, multi_tenant=True)
    tenant.set("k", "v")
    assert store.get("k") == b"v"
    tenant.close()
    assert store.get("k") == b"v"


def test_an_owner_that_holds_the_gil_delays_no_client():
    owner = run(
        """
        import ctypes, sys
        from nc10d.store import TCPStore
        store = TCPStore("127.0.0.1", is_master=True)
        print(store.port, flush=True)
        sys.stdin.readline()
        print("holding", flush=True)
        ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the GIL
        print("no longer", flush=True)
        """
    )
    port = int(owner.stdout.readline())
    with contextlib.closing(TCPStore("127.0.0.1", port, timeout=20)) as store:
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "holding\n"
        # Only a server in a process of its own can answer before the owner releases the GIL.
        for n in range(100):
            assert store.add("n", 1) == n + 1
        assert select.select([owner.stdout], [], [], 0)[0] == []
        assert owner.poll() is None
    owner.kill()
    owner.communicate()


def wait_refused(port: int) -> None:
    """Return once no server listens on `port`."""
    end = time.monotonic() + 30
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            socket.create_connection(("127.0.0.1", port), 1).close()
    assert time.monotonic() < end, f"{port} is still served"


def test_ctrl_c_at_the_terminal_leaves_the_server_to_the_ranks():
    owner = run(
        """
        import os, signal, sys
        from nc10d.store import TCPStore
        os.setsid()
        store = TCPStore("127.0.0.1", is_master=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        print(store.port, flush=True)
        signal.sigwait({signal.SIGINT})
        print("interrupted", flush=True)
        sys.stdin.readline()
        """
    )
    port = int(owner.stdout.readline())
    with contextlib.closing(TCPStore("127.0.0.1", port)) as store:
        os.killpg(owner.pid, signal.SIGINT)
        assert owner.stdout.readline() == "interrupted\n"
        store.set("k", "v")
        assert store.get("k") == b"v"
    owner.communicate("\n", timeout=20)


def test_a_dead_server_is_an_error_at_once(tmp_path):
    server = run("from nc10d.store.__main__ import main; main(['--host=127.0.0.1', '--port=0'])")
    port = int(server.stdout.readline().rpartition(":")[2])
    store = TCPStore("127.0.0.1", port, timeout=60)
    waiter = store.clone()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.get, "never")
        store.set("k", "v")
        assert store.get("k") == b"v"
        server.kill()
        server.communicate()
        with pytest.raises(StoreError, match=rf"127.0.0.1:{port}.*'never'"):
            waiting.result(30)

    def ask_twice():
        for _ in range(2):
            with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
                store.get("k")

    assert takes(ask_twice, 0, 1)
    store.close()
    waiter.close()


def test_a_forked_child_does_not_keep_its_parents_server_alive():
    owner = run(
        """
        import os, sys
        from nc10d.store import TCPStore
        store = TCPStore("127.0.0.1", is_master=True)
        print(store.port, flush=True)
        if os.fork() == 0:
            os.close(1)
            sys.stdin.readline()
            os._exit(0)
        os._exit(0)
        """
    )
    port = int(owner.stdout.readline())
    owner.wait(20)
    wait_refused(port)
    owner.communicate("\n", timeout=20)


def test_the_limits_are_the_owners():
    with owned(limits=m.Limits(key=100, value=1000)) as store:
        store.set("k", bytes(1000))
        assert len(store.get("k")) == 1000
        store.set("k", bytes(1001))
        with pytest.raises(StoreError):
            store.get("k")
        assert len(store.get("k")) == 1000


def test_dropping_a_store_closes_it_without_output():
    store = TCPStore("127.0.0.1", is_master=True)
    port = store.port
    del store
    wait_refused(port)


def test_the_server_listens_on_the_given_address(monkeypatch: pytest.MonkeyPatch):
    from nc10d.store.hosting import listen

    for host, expected in {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}.items():
        with listen(host, 0) as listener:
            assert listener.getsockname()[0] == expected
    with listen("", 0) as here:
        assert here.getsockname()[0] == "127.0.0.1"
    for host in ("192.0.2.1", "0.0.0.0"):
        with pytest.raises(AuthError, match=r"NC10D_TOKEN_FILE.*NC10D_INSECURE=1"):
            listen(host, 0)
    monkeypatch.setenv("NC10D_INSECURE", "1")
    with listen("192.0.2.1", 0) as anywhere:  # an unused address (RFC 5737)
        assert anywhere.getsockname()[0] in ("::", "0.0.0.0")
    monkeypatch.setenv("NC10D_BIND", "127.0.0.2")
    with listen("192.0.2.1", 0) as bound:
        assert bound.getsockname()[0] == "127.0.0.2"


def test_loss_of_packets_ends_no_idle_clients_connection():
    from nc10d.store.hosting import listen

    with listen("127.0.0.1", 0) as listener:
        options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        idle, pause, probes = (listener.getsockopt(socket.IPPROTO_TCP, each) for each in options)
    no_answer = 1.0 - 0.9**2  # at a loss of 10 % both ways
    assert no_answer**probes * (1000 * 3600 / idle) < 1e-4, "in 1,000 hours"
    assert idle + probes * pause <= 60, "a dead host is found out in a minute"


def answering(server: socket.socket, replies: bytes) -> None:
    """Shake hands as a server, send `replies`, and nothing more."""
    peer, _ = server.accept()
    with peer:
        hello = peer.recv(1 << 16)
        peer.sendall(hello[6:10] + replies)
        while peer.recv(1 << 16):
            pass


@pytest.mark.parametrize("name", ["get", "wait", "add", "check", "num_keys", "queue_pop"])
def test_a_frozen_server_makes_calls_time_out_on_time(name: str):
    calls: dict[str, Callable[[TCPStore], object]] = {
        "get": lambda store: store.get("k"),
        "wait": lambda store: store.wait(["k"]),
        "add": lambda store: store.add("k", 1),
        "check": lambda store: store.check(["k"]),
        "num_keys": lambda store: store.num_keys(),
        "queue_pop": lambda store: store.queue_pop("k"),
    }

    def attempt() -> float:
        with socket.create_server(("127.0.0.1", 0)) as frozen:
            port = frozen.getsockname()[1]
            server = threading.Thread(target=answering, args=(frozen, b""))
            server.start()
            with contextlib.closing(TCPStore("127.0.0.1", port, timeout=20)) as store:
                store.set_timeout(0.2)
                begin = time.monotonic()
                with pytest.raises(StoreTimeout, match=f"127.0.0.1:{port}"):
                    calls[name](store)
                took = time.monotonic() - begin
            server.join(20)
        assert took >= 0.2
        return took

    assert soon(0.3, attempt)
