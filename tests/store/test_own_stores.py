"""A user's own Store needs only some of the methods; PrefixStore and the names of torch."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from math import inf

import pytest

from nc10d.base.deadline import Deadline
from nc10d.base.text import in_seconds
from nc10d.errors import RendezvousError, StoreError
from nc10d.init_methods.meeting import meet
from nc10d.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from nc10d.store import wire as m
from nc10d.store.hosting import listen

HOST = "127.0.0.1"


class Minimal(Store):
    """A store with the methods that append, multi_get and multi_set are made of."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.interrupt: Callable[[], object] = lambda: None

    def set(self, key: str, value: object) -> None:
        assert type(value) is bytes, "values come as bytes"
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def compare_set(self, key: str, expected: object, desired: object) -> bytes:
        assert isinstance(expected, bytes)
        assert isinstance(desired, bytes)
        interrupt, self.interrupt = self.interrupt, lambda: None
        if key not in self.values and expected:
            return expected
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        found = self.values[key]
        interrupt()
        return found


def test_methods_made_of_others_do_the_same() -> None:
    store = PrefixStore("p", Minimal())
    assert not store.has_extended_api()
    for part in ("po", "po", "", "tato"):
        store.append("k", part)
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["a", "b", "k"]) == [b"1", b"2", b"popotato"]
    with pytest.raises(ValueError, match="shorter"):
        store.multi_set(["a", "b"], ["1"])


@pytest.mark.parametrize(
    ("meanwhile", "result"),
    [(lambda s: s.set("k", b"x"), b"xv"), (lambda s: s.values.clear(), b"v")],
)
def test_an_append_sees_what_happens_meanwhile(
    meanwhile: Callable[[Minimal], object], result: bytes
) -> None:
    store = Minimal()
    store.set("k", b"w")
    store.interrupt = lambda: meanwhile(store)
    store.append("k", b"v")
    assert store.get("k") == result


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.set("k", "v"),
        lambda store: store.append("k", "v"),
        lambda store: store.wait(["k"]),
        lambda store: store.queue_pop("k"),
        lambda store: store.clone(),
    ],
)
def test_a_method_that_a_store_lacks_names_the_store(call: Callable[[Store], object]) -> None:
    class Empty(Store):
        pass

    with pytest.raises(NotImplementedError, match="Empty has no method"):
        call(Empty())


def test_only_nc10ds_own_stores_have_the_extended_methods() -> None:
    assert HashStore().has_extended_api()
    assert PrefixStore("p", HashStore()).has_extended_api()


def test_a_prefix_needs_a_store() -> None:
    with pytest.raises(TypeError, match="prefix must be text, got int"):
        PrefixStore(3, HashStore())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a store, got int"):
        PrefixStore("p", 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a store, not None"):
        PrefixStore("p", None)  # type: ignore[arg-type]


def test_the_store_below_all_prefixes() -> None:
    base = HashStore()
    assert PrefixStore("p", PrefixStore("q", base))._underlying_non_prefix_store is base


# ---- TCPStore as torch's callers use it ----------------------------------------------------------


@pytest.mark.parametrize("libuv", [False, True])
def test_the_names_of_torchs_arguments(libuv: bool) -> None:
    with contextlib.closing(
        TCPStore(host_name=HOST, port=0, is_master=True, use_libuv=libuv)
    ) as store:
        assert store.libuvBackend is libuv


def test_a_master_is_a_client_where_the_launchers_agent_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(TCPStore(HOST, is_master=True)) as agents:
        with pytest.raises(StoreError, match="The server socket has failed to listen"):
            TCPStore(HOST, agents.port, is_master=True)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_PORT", str(agents.port))
        with contextlib.closing(TCPStore(HOST, agents.port, is_master=True)) as client:
            client.set("k", "v")
        assert agents.get("k") == b"v"


def test_a_foreign_server_gets_nothing_but_a_greeting() -> None:
    greetings: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            greetings.append(sock.recv(100))
            sock.sendall(greetings[0][-4:])
            greetings.append(sock.recv(100))

    with socket.create_server((HOST, 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        TCPStore(HOST, listener.getsockname()[1], timeout=20).close()
        server.join(20)
    hello = m.with_u32(m.VALIDATE, m.MAGIC) + m.simple(m.PING)
    assert [greetings[0][:-4], greetings[1]] == [hello, b""]


def test_a_store_with_a_token_listens_where_it_is_told() -> None:
    with listen("0.0.0.0", 0, bytes(32)) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    with listen("", 0, bytes(32)) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_timeout_says_so_in_round_seconds(kind: str, tmp_path: object) -> None:
    stores: dict[str, Callable[[], Store]] = {
        "hash": HashStore,
        "file": lambda: FileStore(f"{tmp_path}/store"),
        "tcp": lambda: TCPStore(HOST, is_master=True),
    }
    with contextlib.closing(stores[kind]()) as store:
        for wait in (store.wait, lambda keys, limit: store.queue_pop(keys[0])):
            store.set_timeout(0.0199999)
            with pytest.raises(StoreError, match=r"'k': timeout after 0.02 s: "):
                wait(["k"], 0.0199999)


@pytest.mark.parametrize(
    ("limit", "text"),
    [(4.99994, "5 s"), (0.25, "0.25 s"), (1800, "1800 s"), (99.96, "100 s"), (inf, "any time")],
)
def test_times_are_round(limit: float, text: str) -> None:
    assert in_seconds(limit) == text


def test_ranks_that_wait_in_vain_learn_of_a_refused_process() -> None:
    store = HashStore()
    store.set(m.REFUSED, "10.0.0.7")
    with pytest.raises(RendezvousError, match=r"missing: 1.*10\.0\.0\.7.*NC10D_TOKEN_FILE"):
        meet(PrefixStore("a", PrefixStore("b", store)), 0, 2, Deadline.after(0.1), 0.1)
