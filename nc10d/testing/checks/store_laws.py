"""`check_store`: a store's contract, for writers of stores.

check_store(lambda: MyStore(address))      # a new client of the same keys each time
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nc10d.errors import NotANumberError, QueueEmptyError, StoreTimeout
from nc10d.store.base import Store
from nc10d.testing.checks.collected import check_all, must_raise

SHORT, LONG = 0.2, 10.0
"""Seconds for waits that must end by their timeout, and for waits that must not."""
ADDS = 50


def check_store(make: Callable[[], Store]) -> int:
    """Check a store; return the number of checks that held. AssertionError names the others.

    `make()` returns a new client on the same keys each time. Methods that the store lacks are left
    out. Keys begin with "check/".
    """
    first, second = make(), make()
    try:
        for store in (first, second):
            store.set_timeout(LONG)
        return check_all(
            {
                law.__name__.replace("_", " "): lambda law=law: law(  # type: ignore[misc]
                    first, second, f"check/{law.__name__}"
                )
                for law in LAWS
            }
        )
    finally:
        second.close()
        first.close()


def a_value_is_the_bytes_that_another_client_has_set(a: Store, b: Store, key: str) -> None:
    """Text arrives as UTF-8; empty, binary and large values arrive unchanged.

    A set need not wait for its effect (a TCPStore's does not), but a client's calls have an order.
    """
    for value in (b"one", b"", b"\0\xff\n", bytes(range(256)) * 4096):
        a.set(key, value)
        _equal(a.get(key), value)
        _equal(b.get(key), value)
    a.set(f"{key}/é", "ü")
    _equal(b.get(f"{key}/é"), "ü".encode())


def get_waits_until_the_key_exists(a: Store, b: Store, key: str) -> None:
    """A get blocks until another client sets the key."""
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(b.get, key)
        assert not got.done() or got.exception() is None, "get did not wait"
        a.set(key, b"late")
        _equal(got.result(LONG), b"late")


def a_wait_ends_by_its_timeout(a: Store, _: Store, key: str) -> None:
    """The error is a StoreTimeout, which names the key; the key is not made."""
    error = must_raise(StoreTimeout, lambda: a.wait([key], SHORT))
    assert key in str(error), f"the error does not name the key: {error}"
    assert not a.check([key]), "a wait made the key"


def wait_and_check_are_about_all_keys(a: Store, b: Store, key: str) -> None:
    """Both are true once the last key exists."""
    keys = [f"{key}/{i}" for i in range(3)]
    for name in keys:
        assert not b.check(keys), "check is about all keys"
        a.set(name, b"1")
        a.get(name)
    assert b.check(keys), "all keys exist"
    b.wait(keys, LONG)


def adds_of_several_clients_are_counted_once_each(a: Store, b: Store, key: str) -> None:
    """Each add returns another sum; the value is the decimal number."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(_add_often, store, key) for store in (a, b)]
        sums = sorted(total for run in runs for total in run.result(LONG))
    _equal(sums, list(range(1, 2 * ADDS + 1)))
    _equal(a.add(key, -3), 2 * ADDS - 3)
    _equal(int(b.get(key)), 2 * ADDS - 3)


def _add_often(store: Store, key: str) -> list[int]:
    return [store.add(key, 1) for _ in range(ADDS)]


def add_refuses_text(a: Store, _: Store, key: str) -> None:
    """The error is a NotANumberError, and the value stays."""
    a.set(key, b"text")
    must_raise(NotANumberError, lambda: a.add(key, 1))
    _equal(a.get(key), b"text")


def compare_set_swaps_only_the_expected_value(a: Store, b: Store, key: str) -> None:
    """A missing key matches an empty value; the call returns the value afterwards."""
    _equal(a.compare_set(key, b"x", b"1"), b"x")
    assert not a.check([key]), "compare_set made a key that did not match"
    _equal(a.compare_set(key, b"", b"1"), b"1")
    _equal(b.compare_set(key, b"2", b"3"), b"1")
    _equal(b.compare_set(key, b"1", b"3"), b"3")


def a_compare_set_wins_alone(a: Store, b: Store, key: str) -> None:
    """Two clients that swap at the same time see the same winner."""
    barrier = threading.Barrier(2)

    def swap(store: Store, value: bytes) -> bytes:
        barrier.wait(LONG)
        return store.compare_set(key, b"", value)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(swap, store, value) for store, value in ((a, b"a"), (b, b"b"))]
        results = {run.result(LONG) for run in runs}
    assert results == {a.get(key)}, f"two winners: {results}"


def delete_key_returns_whether_there_was_a_value(a: Store, b: Store, key: str) -> None:
    """A deleted key is gone for every client, and can be set again."""
    a.set(key, b"1")
    a.get(key)
    _equal(b.delete_key(key), True)
    _equal(a.delete_key(key), False)
    assert not b.check([key]), "the key is still there"
    a.set(key, b"2")
    _equal(b.get(key), b"2")


def num_keys_and_list_keys_count_keys_with_values(a: Store, b: Store, key: str) -> None:
    """A key that is set twice counts once."""
    before = b.num_keys()
    for value in (b"1", b"2"):
        a.set(key, value)
    a.get(key)
    _equal(b.num_keys(), before + 1)
    _equal(b.list_keys().count(key), 1)


def append_and_the_calls_on_many_keys(a: Store, b: Store, key: str) -> None:
    """append makes a missing key; multi_get keeps the order of its keys."""
    a.append(key, b"one")
    _equal(a.get(key), b"one")
    b.append(key, b"two")
    _equal(b.get(key), b"onetwo")
    keys = [f"{key}/{i}" for i in (2, 0, 1)]
    a.multi_set(keys, [b"c", b"a", b"b"])
    _equal(b.multi_get([*reversed(keys)]), [b"b", b"a", b"c"])


def a_queue_gives_each_value_to_one_client(a: Store, b: Store, key: str) -> None:
    """Values come in the order pushed; an empty queue raises QueueEmptyError without `block`."""
    for value in (b"1", b"2", b"3"):
        a.queue_push(key, value)
    _equal(a.queue_len(key), 3)
    _equal(b.queue_len(key), 3)
    _equal([b.queue_pop(key), a.queue_pop(key), b.queue_pop(key)], [b"1", b"2", b"3"])
    must_raise(QueueEmptyError, lambda: a.queue_pop(key, block=False))
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(b.queue_pop, key)
        a.queue_push(key, b"late")
        _equal(got.result(LONG), b"late")


def a_barrier_ends_with_its_last_call(a: Store, b: Store, key: str) -> None:
    """The first caller waits for the second."""
    must_raise(StoreTimeout, lambda: a.barrier(f"{key}/alone", 2, SHORT))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(a.barrier, key, 2, LONG)
        b.barrier(key, 2, LONG)
        first.result(LONG)


def a_clone_sees_the_same_keys(a: Store, _: Store, key: str) -> None:
    """A clone outlives calls to the original, and closing a clone leaves the original alone."""
    clone = a.clone()
    clone.set(key, b"1")
    clone.get(key)
    clone.close()
    _equal(a.get(key), b"1")


LAWS: tuple[Callable[[Store, Store, str], None], ...] = (
    a_value_is_the_bytes_that_another_client_has_set,
    get_waits_until_the_key_exists,
    a_wait_ends_by_its_timeout,
    wait_and_check_are_about_all_keys,
    adds_of_several_clients_are_counted_once_each,
    add_refuses_text,
    compare_set_swaps_only_the_expected_value,
    a_compare_set_wins_alone,
    delete_key_returns_whether_there_was_a_value,
    num_keys_and_list_keys_count_keys_with_values,
    append_and_the_calls_on_many_keys,
    a_queue_gives_each_value_to_one_client,
    a_barrier_ends_with_its_last_call,
    a_clone_sees_the_same_keys,
)


def _equal(got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"got {_short(got)}, must be {_short(wanted)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."
