"""A store's server and its owner: clients survive terminals, forks and a frozen peer."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from ports import wait_refused

from nc10d.errors import AuthError, StoreError
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
