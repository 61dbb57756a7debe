"""What the seeded bugs put in place of the product's functions.

A Change takes what is really there and returns what is there with the bug; `instead` makes one of
a function that looks at nothing.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nc10d.backend.cpu.control.consensus import DECIDED
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.base import error_wire
from nc10d.errors import StoreTimeout
from nc10d.store import wire as m

Change = Callable[[Any], Any]


def nothing(real: Any) -> Any:
    """Do nothing at all."""
    return lambda *args, **kwargs: None


def instead(function: Any) -> Change:
    """Return the change that puts `function` in place of what is there."""
    return lambda real: function


def silent_set(table: Any, request: Any, client: Any, replies: Any) -> None:
    """Set, and wake nobody."""
    table.values.put(request[1], request[2])


def only_one_missing(table: Any, request: Any, client: Any, replies: Any) -> None:
    """End a wait for several keys with the first."""
    if any(map(table.values.exists, request[1])):
        replies.append((client, m.STOP_WAITING))
    else:
        table._waits[client] = _waiting(set(request[1][:1]))
        table._waiters.setdefault(request[1][0], {})[client] = None


def _waiting(missing: set[bytes]) -> Any:
    return importlib.import_module("nc10d.store.table")._Wait(missing)


def early_barrier(real: Any) -> Any:
    """Open a barrier one client too early."""

    def barrier(table: Any, request: Any, client: Any, replies: Any) -> None:
        real(table, (request[0], request[1], request[2] - 1), client, replies)

    return barrier


def drop_first_held(real: Any) -> Any:
    """Forget the first request behind a wait."""

    def resume(table: Any, client: Any, held: Any, replies: Any) -> None:
        held.popleft()
        real(table, client, held, replies)

    return resume


def always_swaps(values: Any, key: bytes, expected: bytes, desired: bytes) -> bytes:
    """Swap without comparing."""
    values.put(key, desired)
    return desired


def old_sum(values: Any, key: bytes, amount: int) -> int:
    """Return the sum before the addition."""
    before: int = values.number(key)
    values.put(key, b"%d" % (before + amount))
    return before


def newest_first(values: Any, key: bytes) -> bytes | None:
    """Take from the wrong end of a queue."""
    queue = values.queues.get(key)
    if queue is None:
        return None
    value: bytes = queue.pop()
    if not queue:
        del values.queues[key]
    return value


def two_steps(store: Any, key: str, expected: Any, desired: Any) -> Any:
    """Compare and set in two calls, between which others may come."""
    if store.check([key]):
        return store.get(key)
    store.set(key, desired)
    return desired.encode() if isinstance(desired, str) else desired


def one_more(real: Any) -> Any:
    """Wait for one byte more than a request has."""

    def need(error: Any, count: int) -> None:
        real(error, count + 1)

    return need


def first_piece(real: Any) -> Any:
    """Take the next piece for the rest."""
    return lambda link, first, missing: first + link._some(missing)


class _Any:
    """Equal to every number."""

    def __ne__(self, other: object) -> bool:
        return False


def uncounted(real: Any) -> Any:
    """Look at no counter of a frame."""

    def unpack(data: Any, where: int) -> Any:
        return real.unpack_from(data, where)[0], _Any()

    return SimpleNamespace(size=real.size, pack=real.pack, unpack_from=unpack)


def believed(answerer: Any, shown: bytes) -> bytes:
    """Let the caller in, whatever it shows."""
    handshake = importlib.import_module("nc10d.auth.handshake")
    answerer.keys = handshake.Keys(*handshake._keys(answerer._key, answerer._said))
    return b""


def one_rank_less(real: Any) -> Any:
    """Look for all ranks but the last."""
    return lambda store, size, limit: real(store, size - 1, limit)


def unseen(real: Any) -> Any:
    """Never see the verdict."""
    return lambda store, keys, timeout: real(store, keys, timeout) and False


def impatient(store: Any, keys: Any, limit: float) -> bool:
    """Take no answer in time for no."""
    try:
        store.wait(keys, limit)
    except StoreTimeout:
        return False
    return True


def undecided(attempt: Any, topic: str, members: Any, what: Any) -> str:
    """Go by one's own opinion."""
    return json.dumps({"what": what})


def unasked(attempt: Any, members: Any, made: bool, until: Any) -> bool:
    """Ask nobody whether they have made the group."""
    return made


def unnumbered(real: Any) -> Any:
    """Use the same keys for each attempt."""
    return lambda attempt, council, number, gone: real(attempt, council, 1, gone)


def blind(real: Any) -> Any:
    """See no death while the others are awaited."""

    def ask(attempt: Any, *args: Any) -> Any:
        seen, attempt._gone = attempt._gone, set
        try:
            return real(attempt, *args)
        finally:
            attempt._gone = seen

    return ask


def tells(agreement: Any, number: int, value: str) -> None:
    """Let the first round's rank decide, and tell the others."""
    if agreement._whose() == agreement._me:
        agreement._send(agreement._others, DECIDED, value)
    agreement._round, agreement._shown = number, True
    agreement._decide(value)


def mute(agreement: Any, number: int, value: str) -> None:
    """Show nobody what another one has shown."""
    if number > agreement._round or not agreement._shown:
        agreement._round, agreement._value, agreement._shown = number, value, True
        if agreement._whose() == agreement._me:
            agreement._send(agreement._others, number, value)


def steps_back(real: Any) -> Any:
    """Keep one's own value in a new round."""

    def adopt(agreement: Any, number: int, value: str) -> None:
        real(agreement, number, agreement._value or value)

    return adopt


def own_verdict(verdict: Any, error: Any, *, wait: bool) -> None:
    """Fail one's own host, and ask nobody."""
    importlib.import_module("nc10d.backend.cpu.failure.cause").publish(verdict._memory, error)
    verdict._ring(0)


def tells_itself(areas: Any, error: Any) -> None:
    """Tell a cause to nobody else on the host."""
    areas.write_cause(error_wire.encode_error(error, at.CAUSE_BYTES))
    entry_points.compare_and_swap(areas.address(areas.rank) + at.AREA_ABORT, 0, areas.rank + 1)


def last_counts(areas: Any, error: Any) -> None:
    """Let the last cause win."""
    areas.write_cause(error_wire.encode_error(error, at.CAUSE_BYTES))
    for rank in range(areas.size):
        areas._word(rank, at.AREA_ABORT)[0] = areas.rank + 1


def forgets_parts(real: Any) -> Any:
    """Forget a message of which only a part has come."""

    def receive(line: Any) -> Any:
        messages = real(line)
        line._in.clear()
        return messages

    return receive


def again(real: Any) -> Any:
    """Launch the last bucket again."""

    def advance(schedule: Any) -> range:
        left = real(schedule)
        return range(max(0, left.start - 1), left.stop) if left else left

    return advance


def when_ready(schedule: Any, param: int) -> range:
    """Launch a bucket as soon as it is full."""
    schedule._left[param] -= 1
    if schedule._left[param]:
        return range(0)
    bucket = schedule._bucket_of[param]
    schedule._pending[bucket] -= 1
    if schedule._pending[bucket]:
        return range(0)
    schedule._next += 1
    return range(bucket, bucket + 1)


def counts_once(real: Any) -> Any:
    """Expect every gradient once."""
    return lambda schedule, marks: real(schedule, [min(mark, 1) for mark in marks])


def forgets_unused(real: Any) -> Any:
    """Never launch the buckets that nothing is expected in."""

    def begin(schedule: Any, marks: Any) -> range:
        real(schedule, marks)
        return range(0)

    return begin
