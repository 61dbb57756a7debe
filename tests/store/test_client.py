"""TCPStore as a client: with torch's client and server, and with servers that misbehave."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from clocks import soon, takes
from ports import free_port

from nc10d.errors import StoreError, StoreTimeout
from nc10d.store import TCPStore
from nc10d.store import wire as m

torch_dist = pytest.importorskip("torch.distributed")
HOST = "127.0.0.1"
TWENTY = timedelta(seconds=20)


@pytest.fixture
def store() -> Iterator[TCPStore]:
    made = TCPStore(HOST, is_master=True, timeout=20)
    yield made
    made.close()


# ---- with torch ----------------------------------------------------------------------------------


def test_workers_of_both_kinds_are_counted() -> None:
    with ThreadPoolExecutor(2) as pool:
        port = free_port()
        master = pool.submit(TCPStore, HOST, port, 2, True, 20)
        theirs = torch_dist.TCPStore(HOST, port, 2, False, TWENTY)
        with contextlib.closing(master.result(20)) as ours:
            theirs.set("k", "v")
            assert ours.get("k") == b"v"


def test_torchs_master_counts_nc10ds_workers() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        master = pool.submit(torch_dist.TCPStore, HOST, port, 2, True, TWENTY)
        with contextlib.closing(TCPStore(HOST, port, 2, timeout=20)) as ours:
            assert master.result(20).port == port
            ours.set("k", "v")
            assert master.result().get("k") == b"v"


# ---- connecting ----------------------------------------------------------------------------------


def test_the_port_is_free_to_choose_and_can_be_read(store: TCPStore) -> None:
    assert store.host == HOST
    assert store.port > 0
    assert store.check([])


def test_a_world_size_of_0_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="world size cannot be 0"):
        TCPStore(HOST, 0, 0, is_master=True)


def test_the_master_need_not_wait() -> None:
    TCPStore(HOST, 0, 2, is_master=True, timeout=5, wait_for_workers=False).close()


def test_a_port_in_use_is_an_error_at_once(store: TCPStore) -> None:
    with pytest.raises(StoreError, match=rf"{HOST}:{store.port}: .*use \(EADDRINUSE\); .*or 0"):
        TCPStore(HOST, store.port, is_master=True, timeout=20)


def test_tenants_share_a_port() -> None:
    first = TCPStore(HOST, is_master=True, multi_tenant=True, timeout=20)
    second = TCPStore(HOST, first.port, is_master=True, multi_tenant=True, timeout=20)
    first.set("k", "v")
    first.close()
    third = TCPStore(HOST, second.port, is_master=True, multi_tenant=True, timeout=20)
    third.close()
    assert second.get("k") == b"v"
    second.close()


@pytest.mark.parametrize("listens", [True, False])
def test_a_bound_socket_can_be_handed_over_whether_it_listens_or_not(listens: bool) -> None:
    bound = socket.socket()
    bound.bind((HOST, 0))
    if listens:
        bound.listen()
    port = bound.getsockname()[1]
    store = TCPStore(HOST, port, is_master=True, timeout=20, master_listen_fd=bound.detach())
    assert store.port == port
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.close()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_cannot_serve_is_refused_and_stays_the_callers(kind: int) -> None:
    with socket.socket(socket.AF_INET, kind) as unbound:
        with pytest.raises(ValueError, match=r"master_listen_fd .* not a TCP socket .* bound"):
            TCPStore(HOST, 1, is_master=True, timeout=20, master_listen_fd=unbound.fileno())
        unbound.bind((HOST, 0))
    with tempfile.TemporaryFile() as file, pytest.raises(ValueError, match="not a socket"):
        TCPStore(HOST, 1, is_master=True, timeout=20, master_listen_fd=file.fileno())


def test_a_server_that_is_not_up_yet_is_waited_for() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(TCPStore, HOST, port, timeout=20)
        with pytest.raises(TimeoutError):
            client.result(0.1)
        master = TCPStore(HOST, port, is_master=True, timeout=20)
        client.result(20).close()
        master.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_ipv6_works() -> None:
    store = TCPStore("::1", is_master=True, timeout=20)
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.close()


# ---- a server that misbehaves --------------------------------------------------------------------


@contextlib.contextmanager
def server_process() -> Iterator[tuple[int, int]]:
    """Yield port and pid of a server in a process that can be stopped."""
    command = [sys.executable, "-m", "nc10d.store", "--host", HOST, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline().rsplit(":", 1)[1]), child.pid
        finally:
            child.kill()


def freeze(pid: int) -> None:
    """Stop a child process; return once it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def test_a_late_answer_is_never_taken_for_the_next_calls() -> None:
    with server_process() as (port, pid):
        store = TCPStore(HOST, port, timeout=20)
        store.multi_set(["a", "b"], ["for a", "for b"])
        assert store.add("n", 0) == 0
        for _ in range(5):
            freeze(pid)
            store.set_timeout(0.02)
            with pytest.raises(StoreTimeout):
                store.get("a")
            os.kill(pid, signal.SIGCONT)
            store.set_timeout(20)
            assert store.get("b") == b"for b"
        store.close()


def _answer_as_the_wait_is_cancelled(listener: socket.socket) -> None:
    """Serve a connection: each reply comes with the cancellation of its wait."""
    listener.settimeout(5)
    sock, _ = listener.accept()
    with sock:
        sock.settimeout(5)
        nonce = m.U32.unpack(sock.recv(4096)[6:10])[0]
        sock.sendall(m.U32.pack(nonce | m.IS_NC10D))
        for value, confirmed in ((b"v", CANCELED), (b"w", CANCELED), (b"x", b"")):
            assert sock.recv(4096)[:1] != m.simple(m.CANCEL_WAIT)
            assert sock.recv(4096) == m.simple(m.CANCEL_WAIT)
            sock.sendall(STOP + LENGTH_1 + value + confirmed)
        sock.recv(4096)


@pytest.mark.parametrize("call", ["get", "queue_pop"])
def test_a_value_that_comes_as_the_timeout_expires_is_not_lost(call: str) -> None:
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(_answer_as_the_wait_is_cancelled, listener)
        with contextlib.closing(TCPStore(HOST, listener.getsockname()[1], timeout=20)) as store:
            store.set_timeout(0.1)
            assert [getattr(store, call)("k") for _ in range(3)] == [b"v", b"w", b"x"]
        serving.result(10)


def _stall_within_an_answer(listener: socket.socket) -> None:
    """Serve two connections: a reply that stops after the wait's end, then a complete reply."""
    listener.settimeout(5)
    for whole in (False, True):
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(5)
            nonce = m.U32.unpack(sock.recv(4096)[6:10])[0]
            sock.sendall(m.U32.pack(nonce | m.IS_NC10D))
            sock.recv(4096)
            sock.sendall(STOP + LENGTH_1 + b"w" if whole else STOP)
            # Only a client that believes itself to be waiting still sends more.
            if sock.recv(4096):
                sock.sendall(LENGTH_1 + b"v" + CANCELED + STOP + LENGTH_1 + b"x")


STOP, CANCELED, LENGTH_1 = b"\0", b"\1", struct.pack("<Q", 1)


def test_an_answer_that_stops_short_is_not_taken_for_the_end_of_the_wait() -> None:
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(_stall_within_an_answer, listener)
        with contextlib.closing(TCPStore(HOST, listener.getsockname()[1], timeout=20)) as store:
            store.set_timeout(0.1)
            with pytest.raises(StoreTimeout):
                store.get("k")
            store.set_timeout(5)
            assert store.get("k") == b"w"
        serving.result(10)


def test_a_closed_store_reports_it_and_closes_again(store: TCPStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k")


# ---- interruptions, threads, forks ---------------------------------------------------------------


@pytest.mark.parametrize("call", ["get", "add"])
def test_closing_a_store_ends_another_threads_call_as_a_store_error(call: str) -> None:
    errors: list[BaseException] = []

    def repeat_call(store: TCPStore) -> None:
        try:
            while True:
                store.set("came", "")
                store.get("absent") if call == "get" else store.add("n", 1)
        except BaseException as error:  # noqa: BLE001  (checked below)
            errors.append(error)

    with contextlib.closing(TCPStore("127.0.0.1", is_master=True)) as store:
        for _ in range(5):
            client = TCPStore("127.0.0.1", store.port, timeout=30)
            thread = threading.Thread(target=repeat_call, args=(client,))
            thread.start()
            store.wait(["came"], 30)
            client.close()
            thread.join(30)
            assert not thread.is_alive()
            store.delete_key("came")
    assert [type(error) for error in errors] == [StoreError] * 5, errors
    assert all("closed on this rank" in str(error) for error in errors)


def test_the_thread_in_a_call_closes_the_descriptor() -> None:
    """A descriptor's number may be reused as soon as it is closed."""
    with contextlib.closing(TCPStore("127.0.0.1", is_master=True)) as store:
        caller = store._session
        link = caller._connection
        assert link is not None
        with caller._lock, ThreadPoolExecutor(1) as pool:  # as a call holds it
            pool.submit(store.close).result(10)
            assert link.sock.fileno() >= 0
        store.close()
        assert link.sock.fileno() == -1


@pytest.mark.parametrize("period", [0.01, 0.001])
def test_signals_do_not_delay_a_timeout(store: TCPStore, period: float) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, period, period)
    # The signals stop after a while, so that a wait that they delay ends too, and fails the test.
    mercy = threading.Timer(30, signal.setitimer, (signal.ITIMER_REAL, 0))
    mercy.start()
    try:

        def in_vain() -> None:
            with pytest.raises(StoreTimeout):
                store.wait(["never"], 0.2)

        assert takes(in_vain, 0.2, 1)
    finally:
        mercy.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_call_amid_a_call_of_the_same_thread_is_refused_at_once(store: TCPStore) -> None:
    errors: list[str] = []

    def ask(*_: object) -> None:
        with pytest.raises(StoreError, match="amid a call of the same thread") as refused:
            store.get("k")
        errors.append(str(refused.value))

    main = threading.get_ident()

    def disturb() -> None:
        while store._session._holder != main:
            os.sched_yield()
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, ask)
    other = threading.Thread(target=disturb)
    try:
        other.start()
        with pytest.raises(StoreTimeout):
            store.wait(["never"], 1)
        other.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) == 1
    assert "'k'" in errors[0]
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_a_wait_in_another_threads_turn_ends_on_time(store: TCPStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["never"], 4)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)

        def in_vain() -> None:
            with pytest.raises(StoreTimeout, match="another thread"):
                store.wait(["k"], 0.2)

        assert takes(in_vain, 0.2, 0.35)
        with pytest.raises(StoreTimeout):
            waiting.result(30)


def _child_uses(store: TCPStore, number: int) -> None:
    for i in range(50):
        store.set(f"{number}/{i}", str(i))
        assert store.get(f"{number}/{i}") == str(i).encode()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_connection_of_its_own(store: TCPStore) -> None:
    children = [
        multiprocessing.get_context("fork").Process(target=_child_uses, args=(store, number))
        for number in range(2)
    ]
    for child in children:
        child.start()
    _child_uses(store, 2)
    for child in children:
        child.join(20)
        assert child.exitcode == 0
    assert store.get("0/49") == b"49"


# ---- sizes and numbers ---------------------------------------------------------------------------


def test_a_hundred_mebibytes_are_a_value(store: TCPStore) -> None:
    big = os.urandom(1 << 20) * 100
    store.set("big", big)
    assert store.get("big") == big


def test_hundreds_of_clients_connect_at_once(store: TCPStore) -> None:
    def come() -> float:
        started = time.process_time()  # the server's, too
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                client = TCPStore(HOST, store.port, timeout=20)
                stack.enter_context(contextlib.closing(client))
            return time.process_time() - started

    assert soon(2.0, come), "a client costs no more if many are connected"


ALIVE_AT_EXIT = """
import os
from nc10d.store import TCPStore
from nc10d.store.connection import StoreConnection

# The module `os` is cleared last, and these stores with it: the modules they use are gone then.
os.stores = [TCPStore("127.0.0.1", 0, is_master=True, server=kind, token=token)
             for kind in ("process", "thread") for token in (None, bytes(32))]
os.clones = [store.clone() for store in os.stores]
"""


def test_stores_alive_at_the_interpreters_end_print_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALIVE_AT_EXIT], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
