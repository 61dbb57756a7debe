"""Laws of every store: calls return the same as a model, time out, wake waiters, refuse mistakes.

A module of tests has the fixtures: `store` is an empty store, `fresh` makes one at each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nc10d.errors import StoreTimeout
from nc10d.store import Store

# `fresh` makes a new store at every call, so examples share nothing.
FIXTURES = [HealthCheck.function_scoped_fixture]
SOON = 0.1
MakeStore = Callable[[], contextlib.AbstractContextManager[Store]]

KEYS = st.sampled_from(["", "a", "b", "a/b", "ключ"])
VALUES = st.binary(max_size=40)
NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("multi_set"), st.lists(st.tuples(KEYS, VALUES), max_size=4)),
    st.tuples(st.just("add"), KEYS, NUMBERS),
    st.tuples(st.just("list_keys")),
)


class Model:
    """A model of a store: a dict."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key, value):
        self.values[key] = value

    def append(self, key, value):
        self.values[key] = self.values.get(key, b"") + value

    def compare_set(self, key, expected, desired):
        now = self.values.get(key, b"")
        if now == expected:
            self.values[key] = desired
        return self.values.get(key, expected)

    def delete_key(self, key):
        return self.values.pop(key, None) is not None

    def check(self, keys):
        return all(key in self.values for key in keys)

    def multi_set(self, pairs):
        self.values.update(pairs)

    def add(self, key, amount):
        total = (int(self.values.get(key, b"0")) + amount + (1 << 63)) % (1 << 64) - (1 << 63)
        self.values[key] = str(total).encode()
        return total

    def list_keys(self):
        return sorted(self.values)


def call(store: Store, name: str, *arguments: object) -> object:
    if name == "multi_set":
        pairs = arguments[0]
        return store.multi_set([key for key, _ in pairs], [value for _, value in pairs])
    found = getattr(store, name)(*arguments)
    return sorted(found) if name == "list_keys" else found


def is_number(text: bytes) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


@settings(max_examples=40, deadline=None, suppress_health_check=FIXTURES)
@given(calls=st.lists(CALLS, max_size=20))
def calls_return_what_a_dict_would_give(fresh: MakeStore, calls):
    with fresh() as store:
        model = Model()
        for name, *arguments in calls:
            if name == "add" and not is_number(model.values.get(arguments[0], b"0")):
                continue
            assert call(store, name, *arguments) == getattr(model, name)(*arguments)
        keys = sorted(model.values)
        assert store.multi_get(keys) == [model.values[key] for key in keys]


def a_timeout_of_the_call_replaces_the_stores(store: Store):
    with pytest.raises(StoreTimeout):
        store.wait(["absent"], timedelta(seconds=SOON))
    with pytest.raises(StoreTimeout):
        store.barrier("alone", 2, SOON)


def every_kind_of_write_wakes_waiters(store: Store, write: str):
    writes: dict[str, Callable[[Store], object]] = {
        "set": lambda s: s.set("k", "7"),
        "add": lambda s: s.add("k", 7),
        "append": lambda s: s.append("k", "7"),
        "multi_set": lambda s: s.multi_set(["k"], ["7"]),
        "compare_set": lambda s: s.compare_set("k", "", "7"),
        "push": lambda s: s.queue_push("k", "7"),
    }
    waiter = store.clone()
    with ThreadPoolExecutor(1) as pool, contextlib.closing(waiter):
        waiting = pool.submit(waiter.wait if write == "push" else waiter.multi_get, ["k"])
        writes[write](store)
        assert waiting.result(20) in ([b"7"], None)
    if write == "push":
        assert store.queue_pop("k") == b"7"


def additions_from_many_threads_all_count(store: Store):
    def add(_: int) -> None:
        for _ in range(50):
            store.add("n", 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert store.add("n", 0) == 200


def the_callers_mistakes_are_refused_at_the_call(store: Store):
    with pytest.raises(TypeError):
        store.wait("letters")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.set("k", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.get(b"k")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 keys"):
        store.multi_set(["a", "b"], ["1"])
    with pytest.raises(ValueError, match="timeout"):
        store.wait(["k"], -1)
    assert store.has_extended_api()
