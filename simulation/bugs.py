"""Faults that the simulation must find: each one puts a small mistake into the product.

A Bug replaces one function or constant and puts it back; `hunt` plays schedules of the scenarios
where it could show, and says which seed has found it. A fault that nobody finds is a hole in the
laws, not a fault that does no harm.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nc10d.backend.cpu.program.steps import signal, wait, wait_all
from simulation import mistakes as wrong
from simulation.clock import virtual
from simulation.mistakes import Change
from simulation.schedules import SCENARIOS, Failure, play, scenario_of


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


_STORE = ("storing",)
_TABLE, _VALUES, _ATTEMPT = "store.table:Table", "store.values:Values", "group.shrink:ShrinkAttempt"
_COUNCIL, _STEPS = (
    "backend.cpu.control.group_control:GroupControl",
    "backend.cpu.algorithms.all_reduce:",
)
_AGREEMENT = "backend.cpu.control.consensus:Consensus"
_MEETS, _AGREES = ("founding",), ("judging", "shrinking")
_ALIKE = "reducer.verify:"
_SHRINKS, _JUDGES, _REDUCES, _RUNS = ("shrinking",), ("judging",), ("buckets",), ("programs",)

BUGS: dict[str, Bug] = {
    "missing wake-up": Bug(f"{_TABLE}._set", wrong.instead(wrong.silent_set), _STORE),
    "a queue wakes nobody": Bug(f"{_TABLE}._wake_one", wrong.nothing, _STORE),
    "dead waiter not forgotten": Bug(f"{_TABLE}.forget", wrong.nothing, ("deserting", "storing")),
    "held request lost": Bug(f"{_TABLE}._resume", wrong.drop_first_held, _STORE),
    "barrier off by one": Bug(f"{_TABLE}._barrier", wrong.early_barrier, _STORE),
    "wait for all ends with one": Bug(
        f"{_TABLE}._wait", wrong.instead(wrong.only_one_missing), _STORE
    ),
    "compare_set compares nothing": Bug(
        f"{_VALUES}.compare_set", wrong.instead(wrong.always_swaps), _STORE
    ),
    "add returns the old sum": Bug(f"{_VALUES}.add", wrong.instead(wrong.old_sum), _STORE),
    "append replaces": Bug(
        f"{_VALUES}.extend", wrong.instead(lambda values, key, tail: values.put(key, tail)), _STORE
    ),
    "queue in reverse": Bug(f"{_VALUES}.pop", wrong.instead(wrong.newest_first), _STORE),
    "compare_set not atomic": Bug(
        "store.prefix:PrefixStore.compare_set", wrong.instead(wrong.two_steps), _MEETS
    ),
    "parser waits for a byte too many": Bug(
        "store.messages:Incomplete.__init__", wrong.one_more, _STORE
    ),
    "partial read not continued": Bug(
        "store.connection:StoreConnection._rest", wrong.first_piece, _STORE
    ),
    "partial write not continued": Bug("store.server:Server._watch", wrong.nothing, _STORE),
    "wait not taken back": Bug("store.session:StoreSession._take_back", wrong.nothing, _STORE),
    "skipped HMAC of frames": Bug(
        "auth.handshake:compare_digest",
        wrong.instead(lambda shown, right: True),
        ("meddled", "strange"),
    ),
    "replayed frame accepted": Bug("auth.handshake:FRAME", wrong.uncounted, ("meddled",)),
    "caller's proof not checked": Bug(
        "auth.handshake:HandshakeAnswerer._check", wrong.instead(wrong.believed), ("strange",)
    ),
    "strangers stay": Bug(
        "store.auth_server:AuthServer._poll_timeout", wrong.nothing, ("strange",)
    ),
    "differing sizes unnoticed": Bug(
        "rendezvous.methods:_size_disagreement",
        wrong.instead(lambda store, rank, size: ""),
        ("gathering",),
    ),
    "missing rank not named": Bug(
        "rendezvous.methods:_missing_ranks", wrong.one_rank_less, ("gathering",)
    ),
    "verdict not seen": Bug("store.arrival:wait_for_keys", wrong.unseen, _MEETS),
    "far store never answers": Bug(
        "store.arrival:wait_for_keys", wrong.instead(wrong.impatient), _MEETS
    ),
    "death not looked for": Bug(
        "backend.cpu.membership.formation:check_alive", wrong.nothing, ("founding",)
    ),
    "own list of survivors": Bug(f"{_ATTEMPT}._decide", wrong.instead(wrong.undecided), _SHRINKS),
    "group not confirmed": Bug(f"{_ATTEMPT}.confirm", wrong.instead(wrong.unasked), _SHRINKS),
    "confirmation waits for the dead": Bug(f"{_ATTEMPT}.confirm", wrong.blind, _SHRINKS),
    "survivors wait for the dead": Bug(f"{_ATTEMPT}.agree", wrong.blind, _SHRINKS),
    "stale epoch": Bug(f"{_ATTEMPT}.__init__", wrong.unnumbered, _SHRINKS),
    "one judge tells its verdict": Bug(
        f"{_AGREEMENT}._adopt", wrong.instead(wrong.tells), ("judging",)
    ),
    "echo not sent": Bug(f"{_AGREEMENT}._adopt", wrong.instead(wrong.mute), _AGREES),
    "old round believed": Bug(f"{_AGREEMENT}._adopt", wrong.steps_back, _AGREES),
    "dismissed before its last words": Bug(
        f"{_COUNCIL}._ended", wrong.instead(lambda council, rank: rank in council._gone()), _AGREES
    ),
    "lost abort": Bug(
        "backend.cpu.failure.cause:publish", wrong.instead(wrong.tells_itself), _JUDGES
    ),
    "cause overwritten": Bug(
        "backend.cpu.failure.cause:publish", wrong.instead(wrong.last_counts), _JUDGES
    ),
    "every host judges": Bug(
        "backend.cpu.failure.cause:AgreedCause.report", wrong.instead(wrong.own_verdict), _JUDGES
    ),
    "silent ranks awaited": Bug(f"{_COUNCIL}.overdue", wrong.nothing, _JUDGES),
    "cut message forgotten": Bug(
        "backend.cpu.control.connections:ControlConnection.receive", wrong.forgets_parts, _JUDGES
    ),
    "bucket launched twice": Bug("reducer.schedule:Schedule._advance", wrong.again, _REDUCES),
    "buckets leave when ready": Bug(
        "reducer.schedule:Schedule.mark", wrong.instead(wrong.when_ready), _REDUCES
    ),
    "shared parameter counted once": Bug(
        "reducer.schedule:Schedule.begin", wrong.counts_once, _REDUCES
    ),
    "unused bucket never leaves": Bug(
        "reducer.schedule:Schedule.begin", wrong.forgets_unused, _REDUCES
    ),
    "names not compared": Bug(
        f"{_ALIKE}_row", lambda real: lambda spec, name, order: real(spec, "", order), ("alike",)
    ),
    "first difference not agreed": Bug(
        f"{_ALIKE}_least", wrong.instead(lambda group, number: number), ("alike",)
    ),
    "waits for the tick before": Bug(
        f"{_STEPS}wait", wrong.instead(lambda peer, tick: wait(peer, tick - 1)), _RUNS
    ),
    "skipped fingerprint comparison": Bug(
        f"{_STEPS}meet_all", wrong.instead(lambda: wait_all(1)), _RUNS
    ),
    "board reused too early": Bug(
        "backend.cpu.algorithms.broadcast:free", wrong.instead(lambda: signal(0)), _RUNS
    ),
    "reused sequence number": Bug(
        f"{_STEPS}end_round", lambda real: lambda ticks, *rest: real(ticks - 1, *rest), _RUNS
    ),
}
assert all(name in SCENARIOS for bug in BUGS.values() for name in bug.scenarios)
