"""The server's decisions: every call against a model of dicts, and the laws of waits."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.store import wire as m
from nc10d.store.table import Reply, Table
from nc10d.store.values import ENTRY_BYTES, ITEM_BYTES, QUEUE_BYTES, Values

KEYS = st.sampled_from([b"/a", b"/b", b"/c", b"/n"])
VALUES = st.sampled_from([b"", b"1", b"-7", b"x", b"yy"])
LISTS = st.lists(KEYS, max_size=3)
CALLS = st.one_of(
    st.tuples(st.sampled_from([m.SET, m.APPEND, m.QUEUE_PUSH]), KEYS, VALUES),
    st.tuples(st.just(m.COMPARE_SET), KEYS, VALUES, VALUES),
    st.tuples(st.just(m.ADD), KEYS, st.integers(-9, 9)),
    st.tuples(st.sampled_from([m.GET, m.DELETE_KEY, m.QUEUE_POP, m.QUEUE_LEN]), KEYS),
    st.tuples(st.sampled_from([m.CHECK, m.MULTI_GET]), LISTS),
    st.tuples(st.just(m.MULTI_SET), st.lists(st.tuples(KEYS, VALUES), max_size=3)),
    st.tuples(st.sampled_from([m.GETNUMKEYS, m.LIST_KEYS, m.CANCEL_WAIT])),
)


class Model:
    """A model of the protocol in dicts; it answers None if the client must be closed."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    def queue(self, key: bytes) -> deque[bytes]:
        return self.queues.setdefault(key, deque())

    def answer(self, request: m.Request) -> bytes | None:
        data = self.data
        match request:
            case m.SET, key, value:
                data[key] = value
            case m.APPEND, key, value:
                data[key] = data.get(key, b"") + value
            case m.QUEUE_PUSH, key, value:
                self.queue(key).append(value)
            case m.COMPARE_SET, key, expected, desired:
                if key not in data and expected:
                    return m.string(expected)
                if data.get(key, b"") == expected:
                    data[key] = desired
                return m.string(data[key])
            case m.ADD, key, amount:
                try:
                    total = int(data.get(key, b"0")) + amount
                except ValueError:
                    return None
                data[key] = str(total).encode()
                return m.I64.pack(total)
            case m.GET, key:
                return m.string(data.get(key, b""))
            case m.DELETE_KEY, key:
                return m.I64.pack(data.pop(key, None) is not None)
            case m.QUEUE_LEN, key:
                return m.I64.pack(len(self.queue(key)))
            case m.QUEUE_POP, key:
                count = m.I64.pack(len(self.queue(key)))
                return count + (m.string(self.queue(key).popleft()) if self.queue(key) else b"")
            case m.CHECK, keys:
                return bytes((not all(key in data or self.queue(key) for key in keys),))
            case m.MULTI_GET, keys:
                return b"".join(m.string(data.get(key, b"")) for key in keys)
            case m.MULTI_SET, pairs:
                data.update(pairs)
            case (m.GETNUMKEYS,):
                return m.I64.pack(len(data))
            case (m.LIST_KEYS,):
                return m.strings(list(data))
            case (m.CANCEL_WAIT,):
                return m.WAIT_CANCELED
        return b""


def joined(replies: list[tuple[object, bytes | None]], client: object) -> bytes | None:
    """Return the bytes that `client` receives, or None if it is closed."""
    received = [data for receiver, data in replies if receiver == client]
    return None if None in received else b"".join(data for data in received if data is not None)


def settled(table: Table, request: m.Request, client: object) -> list[Reply]:
    """Apply a request, and then the requests that were held behind the waits that it ended."""
    replies = table.apply(request, client)
    while table.released:
        released = table.released.popleft()
        for held in table.held(released):
            table.apply(held, released, replies)
    return replies


@given(st.lists(CALLS, max_size=40))
def test_every_call_answers_as_the_model(calls):
    table, model = Table(), Model()
    for call in calls:
        assert joined(table.apply(call, "me"), "me") == model.answer(call), call
    assert table.values.data == model.data
    entries = sum(len(key) + len(value) + ENTRY_BYTES for key, value in model.data.items())
    queues = sum(
        len(key) + QUEUE_BYTES + sum(len(value) + ITEM_BYTES for value in queue)
        for key, queue in model.queues.items()
        if queue
    )
    assert table.values.nbytes == entries + queues


WRITES = [
    (m.SET, b"/k", b"v"),
    (m.APPEND, b"/k", b"v"),
    (m.ADD, b"/k", 1),
    (m.COMPARE_SET, b"/k", b"", b"v"),
    (m.MULTI_SET, [(b"/k", b"v")]),
    (m.QUEUE_PUSH, b"/k", b"v"),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_wait_ends_when_its_last_key_is_written(write):
    table = Table()
    assert table.apply((m.WAIT, [b"/j", b"/k"]), "waiter") == []
    assert joined(table.apply((m.SET, b"/j", b""), "writer"), "waiter") == b""
    assert joined(table.apply(write, "writer"), "waiter") == m.STOP_WAITING
    assert joined(table.apply((m.WAIT, [b"/j", b"/k"]), "late"), "late") == m.STOP_WAITING


@given(st.permutations([b"/a", b"/b", b"/c"]), st.lists(st.sampled_from([b"/a", b"/b", b"/c"])))
def test_a_wait_ends_with_the_last_of_its_keys_and_not_before(order, keys):
    table = Table()
    missing = set(keys)
    over = bool(table.apply((m.WAIT, keys), "waiter"))
    assert over == (not missing)
    for key in order:
        missing.discard(key)
        woken = joined(table.apply((m.SET, key, b""), "writer"), "waiter")
        assert woken == (m.STOP_WAITING if not missing and not over else b"")
        over = over or bool(woken)


def test_a_push_wakes_all_clients_of_nc10d_and_the_first_other_that_is_ready():
    table = Table()
    for client in ("own", "own too"):
        table.apply((m.PING, m.ASKS), client)
    table.apply((m.WAIT, [b"/q", b"/r"]), "not ready")
    for waiter in ("first", "own", "second", "own too"):
        assert table.apply((m.WAIT, [b"/q"]), waiter) == []
    woken = [("first", m.STOP_WAITING), ("own", m.STOP_WAITING), ("own too", m.STOP_WAITING)]
    assert table.apply((m.QUEUE_PUSH, b"/q", b"v"), "me") == woken
    assert table.apply((m.QUEUE_PUSH, b"/q", b"v"), "me") == [("second", m.STOP_WAITING)]
    assert table.apply((m.SET, b"/r", b""), "me") == [("not ready", m.STOP_WAITING)]


def test_a_taker_gets_a_pushed_value_whoever_else_waits_for_the_key():
    table = Table()
    table.apply((m.PING, m.ASKS), "own")
    for waiter, keys in (("two keys", [b"/q", b"/r"]), ("other", [b"/q"]), ("own", [b"/q"])):
        assert table.apply((m.WAIT, keys), waiter) == []
    for taker in ("first", "second"):
        assert table.apply((m.QUEUE_TAKE, b"/q"), taker) == []
    table.apply((m.QUEUE_LEN, b"/q"), "first")  # held
    replies = settled(table, (m.QUEUE_PUSH, b"/q", b"1"), "me")
    taken = m.STOP_WAITING + m.string(b"1")
    assert joined(replies, "first") == taken + m.I64.pack(0)
    assert joined(replies, "own") == m.STOP_WAITING
    assert {client for client, _ in replies} == {"first", "own"}
    table.apply((m.CANCEL_WAIT,), "second")
    table.apply((m.QUEUE_TAKE, b"/q"), "third")
    table.forget("third")
    replies = table.apply((m.QUEUE_PUSH, b"/q", b"1"), "me")
    assert replies == [("other", m.STOP_WAITING)]
    assert table.apply((m.QUEUE_TAKE, b"/q"), "late") == [("late", taken)]


def test_a_value_under_a_queues_key_does_not_end_a_take():
    table = Table()
    table.apply((m.SET, b"/q", b"a value"), "me")
    assert table.apply((m.QUEUE_TAKE, b"/q"), "taker") == []
    assert table.apply((m.SET, b"/q", b"a value"), "me") == []
    replies = table.apply((m.QUEUE_PUSH, b"/q", b"1"), "me")
    assert joined(replies, "taker") == m.STOP_WAITING + m.string(b"1")


def test_held_requests_may_wait_again_and_wake_others():
    table = Table()
    table.apply((m.WAIT, [b"/1"]), "a")
    table.apply((m.SET, b"/2", b""), "a")
    table.apply((m.WAIT, [b"/3"]), "a")
    table.apply((m.WAIT, [b"/2"]), "b")
    table.apply((m.SET, b"/3", b""), "b")
    table.apply((m.GETNUMKEYS,), "b")
    replies = settled(table, (m.SET, b"/1", b""), "c")
    assert joined(replies, "a") == m.STOP_WAITING * 2
    assert joined(replies, "b") == m.STOP_WAITING + m.I64.pack(3)


def test_the_end_of_a_wait_executes_none_of_the_requests_behind_it():
    table = Table()
    table.apply((m.WAIT, [b"/k"]), "waiter")
    for _ in range(3):
        table.apply((m.ADD, b"/n", 1), "waiter")
    assert table.apply((m.SET, b"/k", b""), "writer") == [("waiter", m.STOP_WAITING)]
    assert list(table.released) == ["waiter"]
    assert list(table.held("waiter")) == [(m.ADD, b"/n", 1)] * 3
    assert list(table.held("waiter")) == []


def test_requests_behind_a_wait_count_until_they_are_taken_or_their_client_leaves():
    table = Table()
    for client in ("takes", "leaves"):
        table.apply((m.WAIT, [b"/k"]), client)
        table.apply((m.ADD, b"/n", 1), client)
        table.apply((m.ADD, b"/n", 1), client)
    table.apply((m.SET, b"/k", b""), "writer")
    table.forget("leaves")
    assert not list(table.held("leaves"))
    list(table.held("takes"))
    assert table.values.nbytes == len(b"/k") + ENTRY_BYTES


def test_cancelling_ends_the_wait_and_discards_held_requests():
    table = Table()
    table.apply((m.WAIT, [b"/k"]), "waiter")
    table.apply((m.GET, b"/k"), "waiter")
    assert table.apply((m.CANCEL_WAIT,), "waiter") == [("waiter", m.WAIT_CANCELED)]
    assert table.apply((m.SET, b"/k", b""), "writer") == []
    assert table.apply((m.GETNUMKEYS,), "waiter") == [("waiter", m.I64.pack(1))]


@pytest.mark.parametrize("wait", [(m.WAIT, [b"/k", b"/j"]), (m.BARRIER, b"/k", 2)])
def test_a_disconnected_client_leaves_no_state(wait):
    table = Table()
    table.apply(wait, "gone")
    table.forget("gone")
    table.forget("never seen")
    assert table.apply((m.SET, b"/k", b"1"), "writer") == []


@given(st.integers(1, 6))
def test_a_barrier_opens_with_its_last_caller_and_stays_open(world_size):
    table = Table()
    call = (m.BARRIER, b"/b", world_size)
    for client in range(world_size - 1):
        assert table.apply(call, client) == []
    replies = table.apply(call, world_size - 1)
    assert sorted(replies) == [(client, m.STOP_WAITING) for client in range(world_size)]
    assert table.apply(call, "late") == [("late", m.STOP_WAITING)]
    assert joined(table.apply((m.GET, b"/b"), 0), 0) == m.string(b"%d" % (world_size + 1))


def test_a_barrier_on_a_value_that_is_no_number_closes_its_caller_alone():
    table = Table()
    table.apply((m.SET, b"/b", b"x"), "me")
    assert table.apply((m.BARRIER, b"/b", 2), "me") == [("me", None)]
    assert table.apply((m.ADD, b"/b", 2), "me") == [("me", None)]
    assert joined(table.apply((m.GET, b"/b"), "other"), "other") == m.string(b"x")


def test_values_beyond_the_total_close_the_writer_and_change_nothing():
    table = Table(m.Limits(total=10 + ENTRY_BYTES + 2))
    table.apply((m.SET, b"/k", b"12345"), "me")
    for write in [(m.SET, b"/j", b"123456"), (m.APPEND, b"/k", b"123456")]:
        assert table.apply(write, "me") == [("me", None)]
    assert table.apply((m.QUEUE_PUSH, b"/q", b"123456"), "me") == [("me", None)]
    assert table.values.data == {b"/k": b"12345"}
    table.apply((m.DELETE_KEY, b"/k"), "me")
    assert table.apply((m.SET, b"/j", b"1234567890"), "me") == []


def test_too_much_behind_a_wait_closes_the_client():
    table = Table()
    table.apply((m.WAIT, [b"/never"]), "me")
    assert table.apply((m.SET, b"/k", bytes(1 << 20)), "me") == [("me", None)]


def test_an_append_copies_its_own_bytes_alone():
    values = Values()
    values.extend(b"/k", b"a")
    grown = values.data[b"/k"]
    values.extend(b"/k", b"b")
    assert values.data[b"/k"] is grown
    assert values.get(b"/k") == b"ab"


def test_an_append_leaves_earlier_replies_as_they_are():
    table, large = Table(), bytes(1 << 20)
    table.apply((m.APPEND, b"/k", large), "me")
    reply = table.apply((m.GET, b"/k"), "me")
    assert table.apply((m.APPEND, b"/k", b"more"), "me") == []
    assert joined(reply, "me") == m.string(large)
    assert joined(table.apply((m.GET, b"/k"), "me"), "me") == m.string(large + b"more")


def test_a_large_value_is_answered_without_a_copy():
    table = Table()
    value = bytes(1 << 20)
    table.apply((m.SET, b"/k", value), "me")
    assert table.apply((m.GET, b"/k"), "me")[-1][1].obj is value
