"""Faults that the simulation must find: each one puts a small mistake into the product.

A Bug replaces one function or constant and puts it back; `hunt` plays schedules of the scenarios
where it could show, and says which seed has found it. A fault that nobody finds is a hole in the
laws, not a fault that does no harm.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from nc10d.backend.cpu.native import engine
from nc10d.backend.cpu.native import layout as at
from nc10d.backend.cpu.program import signal, wait, wait_all
from nc10d.deadline import NEVER
from nc10d.errors import StoreTimeout
from nc10d.store import messages as m
from nc10d.testing.simulation.clock import virtual
from nc10d.testing.simulation.schedules import SCENARIOS, Failure, play, scenario_of

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Bug:
    """`change` makes of what `where` names ("module:object.attribute") something wrong."""

    where: str
    change: Change
    scenarios: tuple[str, ...]

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Have the bug for a while."""
        module, _, path = self.where.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(f"nc10d.{module}")
        for each in owners:
            owner = getattr(owner, each)
        real = getattr(owner, name)
        setattr(owner, name, self.change(real))
        try:
            yield
        finally:
            setattr(owner, name, real)


def hunt(bug: Bug, count: int, begin: int = 0) -> Failure | None:
    """Play schedules of the bug's scenarios among the first `count` seeds; what finds it first."""
    with bug.present(), virtual():
        for seed in range(begin, begin + count):
            if scenario_of(seed) in bug.scenarios:
                try:
                    play(seed)
                except Failure as failure:
                    return failure
    return None


def _nothing(real: Any) -> Any:
    return lambda *args, **kwargs: None


def _instead(function: Any) -> Change:
    return lambda real: function


def _silent_set(table: Any, request: Any, client: Any, replies: Any) -> None:
    table.values.put(request[1], request[2])


def _only_one_missing(table: Any, request: Any, client: Any, replies: Any) -> None:
    if any(map(table.values.exists, request[1])):
        replies.append((client, m.STOP_WAITING))
    else:
        table._waits[client] = type_of_wait(set(request[1][:1]))
        table._waiters.setdefault(request[1][0], {})[client] = None


def type_of_wait(missing: set[bytes]) -> Any:
    """Make what a table remembers of a client that waits."""
    return importlib.import_module("nc10d.store.table")._Wait(missing)


def _early_barrier(real: Any) -> Any:
    def barrier(table: Any, request: Any, client: Any, replies: Any) -> None:
        real(table, (request[0], request[1], request[2] - 1), client, replies)

    return barrier


def _drop_first_held(real: Any) -> Any:
    def resume(table: Any, client: Any, held: Any, replies: Any) -> None:
        held.popleft()
        real(table, client, held, replies)

    return resume


def _always_swaps(values: Any, key: bytes, expected: bytes, desired: bytes) -> bytes:
    values.put(key, desired)
    return desired


def _old_sum(values: Any, key: bytes, amount: int) -> int:
    before: int = values.number(key)
    values.put(key, b"%d" % (before + amount))
    return before


def _newest_first(values: Any, key: bytes) -> bytes | None:
    queue = values.queues.get(key)
    if queue is None:
        return None
    value: bytes = queue.pop()
    if not queue:
        del values.queues[key]
    return value


def _two_steps(store: Any, key: str, expected: Any, desired: Any) -> Any:
    if store.check([key]):
        return store.get(key)
    store.set(key, desired)
    return desired.encode() if isinstance(desired, str) else desired


def _one_more(real: Any) -> Any:
    def need(error: Any, count: int) -> None:
        real(error, count + 1)

    return need


def _first_piece(real: Any) -> Any:
    return lambda link, first, missing: first + link._some(missing)


class _Any:
    """Equal to every number."""

    def __ne__(self, other: object) -> bool:
        return False


def _uncounted(real: Any) -> Any:
    def unpack(data: Any, where: int) -> Any:
        return real.unpack_from(data, where)[0], _Any()

    return SimpleNamespace(size=real.size, pack=real.pack, unpack_from=unpack)


def _believed(answerer: Any, shown: bytes) -> bytes:
    handshake = importlib.import_module("nc10d.handshake")
    answerer.keys = handshake.Keys(*handshake._keys(answerer._key, answerer._said))
    return b""


def _one_rank_less(real: Any) -> Any:
    return lambda store, size, limit: real(store, size - 1, limit)


def _unseen(real: Any) -> Any:
    return lambda store, timeout: real(store, timeout) and False


def _overwrite(store: Any, members: Any) -> None:
    store.set("members", importlib.import_module("json").dumps(members))


def _impatient(store: Any, keys: Any, limit: float) -> bool:
    try:
        store.wait(keys, limit)
    except StoreTimeout:
        return False
    return True


def _unasked(store: Any, members: Any, gone: Any, made: bool, until: Any) -> bool:
    return made


def _unnumbered(real: Any) -> Any:
    return lambda name, store: real(name.rstrip("0123456789"), store)


def _blind(real: Any) -> Any:
    return lambda store, members, gone, made, until: real(store, members, set, made, NEVER)


def _waits_for_the_dead(real: Any) -> Any:
    return lambda store, size, rank, gone, until: real(store, size, rank, set, until)


def _tells_itself(areas: Any, error: Any) -> None:
    areas.write_cause(importlib.import_module("nc10d.backend.cpu.causes").encoded(error))
    engine.compare_and_swap(areas.address(areas.rank) + at.AREA_ABORT, 0, areas.rank + 1)


def _last_counts(areas: Any, error: Any) -> None:
    areas.write_cause(importlib.import_module("nc10d.backend.cpu.causes").encoded(error))
    for rank in range(areas.size):
        areas._word(rank, at.AREA_ABORT)[0] = areas.rank + 1


def _forgets_parts(real: Any) -> Any:
    def receive(line: Any) -> Any:
        messages = real(line)
        line._in.clear()
        return messages

    return receive


def _again(real: Any) -> Any:
    def advance(schedule: Any) -> range:
        left = real(schedule)
        return range(max(0, left.start - 1), left.stop) if left else left

    return advance


def _when_ready(schedule: Any, param: int) -> range:
    schedule._left[param] -= 1
    if schedule._left[param]:
        return range(0)
    bucket = schedule._bucket_of[param]
    schedule._pending[bucket] -= 1
    if schedule._pending[bucket]:
        return range(0)
    schedule._next += 1
    return range(bucket, bucket + 1)


def _counts_once(real: Any) -> Any:
    return lambda schedule, marks: real(schedule, [min(mark, 1) for mark in marks])


def _forgets_unused(real: Any) -> Any:
    def begin(schedule: Any, marks: Any) -> range:
        real(schedule, marks)
        return range(0)

    return begin


_STORE = ("storing",)
_TABLE, _VALUES, _SHRINK = "store.table:Table", "store.values:Values", "shrink:"
_COUNCIL, _STEPS = "backend.cpu.council:Council", "backend.cpu.algorithms.all_reduce:"
_MEETS = ("founding", "shrinking")
_ALIKE = "reducer.agreement:"
_SHRINKS, _JUDGES, _REDUCES, _RUNS = ("shrinking",), ("judging",), ("buckets",), ("programs",)

BUGS: dict[str, Bug] = {
    "missing wake-up": Bug(f"{_TABLE}._set", _instead(_silent_set), _STORE),
    "a queue wakes nobody": Bug(f"{_TABLE}._wake_one", _nothing, _STORE),
    "dead waiter not forgotten": Bug(f"{_TABLE}.forget", _nothing, ("deserting", "storing")),
    "held request lost": Bug(f"{_TABLE}._resume", _drop_first_held, _STORE),
    "barrier off by one": Bug(f"{_TABLE}._barrier", _early_barrier, _STORE),
    "wait for all ends with one": Bug(f"{_TABLE}._wait", _instead(_only_one_missing), _STORE),
    "compare_set compares nothing": Bug(f"{_VALUES}.compare_set", _instead(_always_swaps), _STORE),
    "add returns the old sum": Bug(f"{_VALUES}.add", _instead(_old_sum), _STORE),
    "append replaces": Bug(
        f"{_VALUES}.extend", _instead(lambda values, key, tail: values.put(key, tail)), _STORE
    ),
    "queue in reverse": Bug(f"{_VALUES}.pop", _instead(_newest_first), _STORE),
    "compare_set not atomic": Bug(
        "store.prefix:PrefixStore.compare_set", _instead(_two_steps), _MEETS
    ),
    "parser waits for a byte too many": Bug(
        "store.messages:Incomplete.__init__", _one_more, _STORE
    ),
    "partial read not continued": Bug("store.link:Link._rest", _first_piece, _STORE),
    "partial write not continued": Bug("store.server:Server._watch", _nothing, _STORE),
    "wait not taken back": Bug("store.caller:Caller._take_back", _nothing, _STORE),
    "skipped HMAC of frames": Bug(
        "handshake:compare_digest", _instead(lambda shown, right: True), ("meddled", "strange")
    ),
    "replayed frame accepted": Bug("handshake:FRAME", _uncounted, ("meddled",)),
    "caller's proof not checked": Bug(
        "handshake:Answerer._check", _instead(_believed), ("strange",)
    ),
    "strangers stay": Bug("store.guarded:GuardedServer._patience", _nothing, ("strange",)),
    "differing sizes unnoticed": Bug(
        "rendezvous:_dispute", _instead(lambda store, rank, size: ""), ("gathering",)
    ),
    "missing rank not named": Bug("rendezvous:_who_is_missing", _one_rank_less, ("gathering",)),
    "verdict not seen": Bug("backend.cpu.forming:_decided", _unseen, ("founding",)),
    "death not looked for": Bug("backend.cpu.forming:check_alive", _nothing, ("founding",)),
    "list of survivors overwritten": Bug(f"{_SHRINK}_propose", _instead(_overwrite), _SHRINKS),
    "group not confirmed": Bug(f"{_SHRINK}confirm", _instead(_unasked), _SHRINKS),
    "confirmation waits for the dead": Bug(f"{_SHRINK}confirm", _blind, _SHRINKS),
    "survivors wait for the dead": Bug(f"{_SHRINK}agree", _waits_for_the_dead, _SHRINKS),
    "far store never answers": Bug(f"{_SHRINK}_there", _instead(_impatient), _SHRINKS),
    "stale epoch": Bug(f"{_SHRINK}prefix_store", _unnumbered, _SHRINKS),
    "dropped cause": Bug(f"{_COUNCIL}.tell", _nothing, _JUDGES),
    "lost abort": Bug("backend.cpu.causes:publish", _instead(_tells_itself), _JUDGES),
    "cause overwritten": Bug("backend.cpu.causes:publish", _instead(_last_counts), _JUDGES),
    "every host judges": Bug(
        f"{_COUNCIL}._judges",
        _instead(lambda council: council.hosts.mates(council.number)),
        _JUDGES,
    ),
    "stopped judge awaited": Bug(f"{_COUNCIL}.overdue", _nothing, _JUDGES),
    "cut message forgotten": Bug("backend.cpu.control:Line.receive", _forgets_parts, _JUDGES),
    "bucket launched twice": Bug("reducer.schedule:Schedule._advance", _again, _REDUCES),
    "buckets leave when ready": Bug(
        "reducer.schedule:Schedule.mark", _instead(_when_ready), _REDUCES
    ),
    "shared parameter counted once": Bug("reducer.schedule:Schedule.begin", _counts_once, _REDUCES),
    "unused bucket never leaves": Bug("reducer.schedule:Schedule.begin", _forgets_unused, _REDUCES),
    "names not compared": Bug(
        f"{_ALIKE}_row", lambda real: lambda spec, name, order: real(spec, "", order), ("alike",)
    ),
    "first difference not agreed": Bug(
        f"{_ALIKE}_least", _instead(lambda group, number: number), ("alike",)
    ),
    "waits for the tick before": Bug(
        f"{_STEPS}wait", _instead(lambda peer, tick: wait(peer, tick - 1)), _RUNS
    ),
    "skipped fingerprint comparison": Bug(
        f"{_STEPS}meet_all", _instead(lambda: wait_all(1)), _RUNS
    ),
    "board reused too early": Bug(
        "backend.cpu.algorithms.broadcast:free", _instead(lambda: signal(0)), _RUNS
    ),
    "reused sequence number": Bug(
        f"{_STEPS}end_round", lambda real: lambda ticks, *rest: real(ticks - 1, *rest), _RUNS
    ),
}
assert all(name in SCENARIOS for bug in BUGS.values() for name in bug.scenarios)
