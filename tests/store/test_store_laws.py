"""Every store obeys the same laws: calls return the same as a model of a dict and queues."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import store_laws as laws
from clocks import takes
from hypothesis import given, settings
from hypothesis import strategies as st
from store_laws import FIXTURES, SOON, VALUES, MakeStore

from nc10d.errors import QueueEmptyError, StoreTimeout
from nc10d.store import FileStore, HashStore, PrefixStore, Store, TCPStore

KINDS = ("hash", "tcp", "tcp thread", "tcp token", "file", "prefix", "prefix tcp")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, TCPStore]]:
    kinds = {"tcp": "process", "prefix tcp": "process", "tcp thread": "thread"}
    kinds["tcp token"] = "process"
    with contextlib.ExitStack() as stack:
        made = {}
        for name, kind in kinds.items():
            token = b"t" * 32 if name == "tcp token" else None
            store = TCPStore("127.0.0.1", is_master=True, server=kind, token=token)
            made[name] = stack.enter_context(contextlib.closing(store))
        yield made


@pytest.fixture(params=KINDS)
def fresh(request, servers: dict[str, TCPStore], tmp_path: Path) -> MakeStore:
    """Return a function that makes an empty store at each call."""
    number = iter(range(1 << 30))

    @contextlib.contextmanager
    def make() -> Iterator[Store]:
        store: Store
        match request.param:
            case "hash":
                store = HashStore()
            case "file":
                store = FileStore(tmp_path / f"store{next(number)}", 1)
            case "prefix":
                store = PrefixStore("inner", PrefixStore("outer", HashStore()))
            case name:
                store = servers[name]
                for key in store.list_keys():
                    store.delete_key(key)
                if name == "prefix tcp":
                    store = PrefixStore(f"p{next(number)}", store)
        yield store
        if request.param == "file":
            store.close()

    return make


@pytest.fixture
def store(fresh: MakeStore) -> Iterator[Store]:
    with fresh() as made:
        yield made


test_calls_return_what_a_dict_would_give = laws.calls_return_what_a_dict_would_give
test_additions_from_many_threads_all_count = laws.additions_from_many_threads_all_count
test_a_timeout_of_the_call_replaces_the_stores = laws.a_timeout_of_the_call_replaces_the_stores
test_the_callers_mistakes_are_refused_at_the_call = (
    laws.the_callers_mistakes_are_refused_at_the_call
)


@pytest.mark.parametrize("write", ["set", "add", "append", "multi_set", "compare_set", "push"])
def test_every_kind_of_write_wakes_waiters(store: Store, write: str):
    laws.every_kind_of_write_wakes_waiters(store, write)


@settings(max_examples=30, deadline=None, suppress_health_check=FIXTURES)
@given(items=st.lists(st.one_of(VALUES, st.none()), max_size=20))
def test_a_queue_returns_values_in_the_order_pushed(fresh: MakeStore, items):
    with fresh() as store:
        expected: list[bytes] = []
        for item in items:
            if item is not None:
                store.queue_push("q", item)
                expected.append(item)
            elif expected:
                assert store.queue_pop("q") == expected.pop(0)
            else:
                with pytest.raises(QueueEmptyError):
                    store.queue_pop("q", block=False)
            assert store.queue_len("q") == len(expected)
            assert store.check(["q"]) == bool(expected)
        while expected:
            assert store.queue_pop("q", block=False) == expected.pop(0)


def test_a_queue_and_a_value_may_share_a_key(store: Store):
    store.set("k", "value")
    store.queue_push("k", "queued")
    assert store.get("k") == b"value"
    assert store.queue_pop("k") == b"queued"
    assert store.get("k") == b"value"
    store.queue_push("k", "again")
    assert store.delete_key("k")
    assert store.queue_len("k") == 1
    assert store.queue_pop("k") == b"again"


def test_num_keys_counts_new_keys(store: Store):
    before = store.num_keys()
    store.multi_set(["a", "b"], ["1", b"2"])
    store.queue_push("queues do not count", "x")
    assert store.num_keys() == before + 2
    assert store.queue_pop("queues do not count") == b"x"


def test_keys_values_and_amounts_may_be_of_other_types(store: Store):
    store.multi_set(iter(["a", "b"]), iter(["1", "2"]))  # type: ignore[arg-type]
    assert store.multi_get(iter(["b", "a"])) == [b"2", b"1"]  # type: ignore[arg-type]
    assert store.check(iter(["b", "a"]))  # type: ignore[arg-type]
    store.wait(iter(["b", "a"]), SOON)  # type: ignore[arg-type]
    with pytest.raises(StoreTimeout, match="'b', 'absent'"):
        store.wait(iter(["b", "absent"]), SOON)  # type: ignore[arg-type]
    assert store.add("a", np.int64(2)) == 3
    assert store.add("a", np.int32(-4)) == -1


@pytest.mark.parametrize("blocked", ["get", "multi_get", "wait", "queue_pop", "barrier"])
def test_a_call_that_times_out_names_its_keys(store: Store, blocked: str):
    store.set_timeout(SOON)
    assert store.timeout == timedelta(seconds=SOON)
    calls = {
        "get": lambda: store.get("absent"),
        "multi_get": lambda: store.multi_get(["absent"]),
        "wait": lambda: store.wait(["absent"]),
        "queue_pop": lambda: store.queue_pop("absent"),
        "barrier": lambda: store.barrier("absent", 100),
    }

    def in_vain():
        with pytest.raises(StoreTimeout, match="absent"):
            calls[blocked]()

    assert takes(in_vain, SOON, SOON + 0.3)
    store.set_timeout(timedelta(seconds=60))
    store.set("present", "1")
    assert store.get("present") == b"1"


@pytest.mark.parametrize("more", [[], ["absent"]])
def test_a_popper_gets_a_value_though_others_wait_for_the_key(store: Store, more: list[str]):
    store.set("work", "a value of the same key")
    waiters, popper = [store.clone(), store.clone()], store.clone()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(waiter.wait, ["queue", *more]) for waiter in waiters]
        popped = pool.submit(popper.queue_pop, "work")
        store.queue_push("work", "1")
        assert popped.result(20) == b"1"
        for key in ("queue", *more):
            store.queue_push(key, "2")
        for call in waiting:
            call.result(20)
        popped = pool.submit(popper.queue_pop, "queue")
        assert popped.result(20) == b"2"
    for clone in (*waiters, popper):
        clone.close()


def test_each_pushed_value_reaches_one_popper(store: Store):
    clones = [store.clone() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        popped = [pool.submit(clone.queue_pop, "work") for clone in clones]
        for n in range(4):
            store.queue_push("work", str(n))
        assert sorted(call.result(20) for call in popped) == [b"0", b"1", b"2", b"3"]
    for clone in clones:
        clone.close()


def test_no_caller_leaves_a_barrier_before_the_last_has_arrived(store: Store):
    clones = [store.clone() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        left = [pool.submit(clone.barrier, "b", 4) for clone in clones]
        assert not any(call.done() for call in left)
        store.barrier("b", 4)
        for call in left:
            call.result(20)
    for clone in clones:
        clone.close()


def test_prefixes_keep_keys_apart():
    below = HashStore()
    first, second = PrefixStore("one", below), PrefixStore("two", below)
    first.set("k", "1")
    second.set("k", "2")
    assert (first.get("k"), second.get("k")) == (b"1", b"2")
    assert sorted(below.list_keys()) == ["one/k", "two/k"]
    assert first.list_keys() == ["k"]
    assert first.underlying_store is below
    first.set_timeout(7)
    assert second.timeout == timedelta(seconds=7)


def test_a_waiting_thread_of_a_hash_store_delays_no_other():
    store = HashStore()
    waiting = threading.Thread(target=store.wait, args=(["k"],))
    waiting.start()
    assert store.add("other", 1) == 1
    store.set("k", "")
    waiting.join(20)
    assert not waiting.is_alive()
