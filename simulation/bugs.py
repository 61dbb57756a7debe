"""Seeded bugs: small mistakes in the product that the simulation must find.

A Bug replaces one function or constant of the product and puts it back. `hunt` plays schedules of
the scenarios in which the bug can show, and returns the first Failure. A bug without a Failure is a
hole in the laws, not a harmless bug.

A law must find the bug. A bug that no longer fits the product is an error: BugTargetMissing where
its target does not exist, BrokenBug where it raises an AttributeError or the like in the product.
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

_MISFITS = (AttributeError, ImportError, NameError, TypeError)


class BugTargetMissing(LookupError):
    """The product does not have the function or constant that a Bug replaces."""


class BrokenBug(RuntimeError):
    """A run ended with an error of the seeded bug itself, not with a broken law."""


@dataclass(frozen=True)
class Bug:
    """A replacement of the target "module:object.attribute", relative to nc10d, by a wrong one.

    `change` takes the real attribute and returns the wrong one. `scenarios` can find the bug.
    """

    target: str
    change: Change
    scenarios: tuple[str, ...]

    def resolve(self) -> tuple[Any, str, Any]:
        """Return owner, attribute name and present value; BugTargetMissing if any is missing."""
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        try:
            owner: Any = importlib.import_module(f"nc10d.{module}")
            for attribute in owners:
                owner = getattr(owner, attribute)
            return owner, name, getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise BugTargetMissing(f"a seeded bug replaces {self.target!r}: {error}") from error

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Have the bug in the product for a while; BugTargetMissing if it does not fit."""
        owner, name, real = self.resolve()
        setattr(owner, name, self.change(real))
        try:
            yield
        finally:
            setattr(owner, name, real)


def hunt(bug: Bug, count: int, begin: int = 0) -> Failure | None:
    """Play the bug's scenarios among `count` seeds; return the first Failure, or None.

    BrokenBug if the run failed because the bug does not fit the product any more.
    """
    with bug.present(), virtual():
        for seed in range(begin, begin + count):
            if scenario_of(seed) in bug.scenarios:
                try:
                    play(seed)
                except Failure as failure:
                    _require_broken_law(bug, failure)
                    return failure
    return None


def _require_broken_law(bug: Bug, failure: Failure) -> None:
    for error in failure.errors:
        if isinstance(error, _MISFITS):
            message = f"the seeded bug in {bug.target!r} raises {type(error).__name__}: {error}"
            raise BrokenBug(message) from failure


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
        "store.wire:Incomplete.__init__", wrong.one_more, _STORE
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
