"""The wrong functions that seeded bugs put in place of the product's functions.

A Change takes the product's function and returns a wrong function. `instead` makes a Change of a
function that does not need the real function.
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
from nc10d.store import wire as m

Change = Callable[[Any], Any]


def nothing(real: Any) -> Any:
    """Do nothing in place of the function."""
    return lambda *args, **kwargs: None


def instead(function: Any) -> Change:
    """Return the Change that puts `function` in place of the product's function."""
    return lambda real: function


def silent_set(table: Any, request: Any, client: Any, replies: Any) -> None:
    """Set a key without waking its waiters."""
    table.values.put(request[1], request[2])


def silent_push(table: Any, request: Any, client: Any, replies: Any) -> None:
    """Append a value to a queue and wake nobody."""
    table.values.push(request[1], request[2])


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
    """Open a barrier a client too early."""

    def barrier(table: Any, request: Any, client: Any, replies: Any) -> None:
        real(table, (request[0], request[1], request[2] - 1), client, replies)

    return barrier


def always_swaps(values: Any, key: bytes, expected: bytes, desired: bytes) -> bytes:
    """Swap without comparing."""
    values.put(key, desired)
    return desired


def old_sum(values: Any, key: bytes, amount: int) -> int:
    """Return the sum before the addition."""
    before: int = values.number(key)
    values.put(key, b"%d" % (before + amount))
    return before


def not_withdrawn(session: Any, connection: Any) -> bool:
    """Take a wait for cancelled without a word to the server."""
    session._canceled = True
    return False


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


def one_byte_more(real: Any) -> Any:
    """Wait for a byte more than a request has."""

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


def ignore_counter(real: Any) -> Any:
    """Ignore the counters of frames."""

    def unpack(data: Any, where: int) -> Any:
        return real.unpack_from(data, where)[0], _Any()

    return SimpleNamespace(size=real.size, pack=real.pack, unpack_from=unpack)


def accept_any_proof(answerer: Any, shown: bytes) -> bytes:
    """Accept the caller's proof without checking it."""
    handshake = importlib.import_module("nc10d.auth.handshake")
    answerer.keys = handshake.Keys(*handshake._keys(answerer._key, answerer._transcript))
    return b""


def one_rank_less(real: Any) -> Any:
    """Name all missing ranks but the last."""

    def absence(visit: Any) -> Any:
        visit._size -= 1
        return real(visit)

    return absence


def without_consent(real: Any) -> Any:
    """Take marks in all places for a world."""

    def look(visit: Any) -> str:
        outcome: str = real(visit)
        if visit._consents and not outcome:
            outcome = visit._end(f"met {visit._consents[-1]}")
        return outcome

    return look


def never_seen(real: Any) -> Any:
    """Never see the outcome of an arrival."""
    return lambda store, keys, timeout: real(store, keys, timeout) and False


def own_list(attempt: Any, topic: str, members: Any, value: Any) -> str:
    """Return this rank's own list without a decision."""
    return json.dumps({"what": value})


def own_confirmation(attempt: Any, members: Any, made: bool, until: Any) -> bool:
    """Return this rank's own outcome without asking the members."""
    return made


def same_keys(real: Any) -> Any:
    """Use the same keys for each attempt."""
    return lambda attempt, control, number, gone: real(attempt, control, 1, gone)


def ignore_deaths(real: Any) -> Any:
    """Ignore deaths while waiting for the other ranks."""

    def ask(attempt: Any, *args: Any) -> Any:
        seen, attempt._gone = attempt._gone, set
        try:
            return real(attempt, *args)
        finally:
            attempt._gone = seen

    return ask


def decides_alone(consensus: Any, number: int, value: str) -> None:
    """Let the first round's coordinator decide alone and send its decision."""
    if consensus._round_rank() == consensus._me:
        consensus._send(consensus._others, DECIDED, value)
    consensus._round, consensus._shown = number, True
    consensus._decide(value)


def no_echo(consensus: Any, number: int, value: str) -> None:
    """Do not echo a value that another rank has sent."""
    if number > consensus._round or not consensus._shown:
        consensus._round, consensus._value, consensus._shown = number, value, True
        if consensus._round_rank() == consensus._me:
            consensus._send(consensus._others, number, value)


def keep_old_value(real: Any) -> Any:
    """Keep this rank's own value in a new round."""

    def adopt(consensus: Any, number: int, value: str) -> None:
        real(consensus, number, consensus._value or value)

    return adopt


def own_cause(agreed: Any, error: Any, *, wait: bool) -> None:
    """Publish this host's own cause without consensus."""
    importlib.import_module("nc10d.backend.cpu.failure.cause").publish(agreed._memory, error)
    agreed._ring(0)


def cause_for_itself(areas: Any, error: Any) -> None:
    """Publish a cause to no other rank of the host."""
    areas.write_cause(error_wire.encode_error(error, at.CAUSE_BYTES))
    entry_points.compare_and_swap(areas.address(areas.rank) + at.AREA_ABORT, 0, areas.rank + 1)


def last_cause_wins(areas: Any, error: Any) -> None:
    """Let the last cause overwrite earlier causes."""
    areas.write_cause(error_wire.encode_error(error, at.CAUSE_BYTES))
    for rank in range(areas.size):
        areas._word(rank, at.AREA_ABORT)[0] = areas.rank + 1


def drop_partial(real: Any) -> Any:
    """Drop the first part of a message that comes in parts."""

    def receive(line: Any) -> Any:
        messages = real(line)
        line._in.clear()
        return messages

    return receive
