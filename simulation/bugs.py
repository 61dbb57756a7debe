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

from simulation import mistakes as wrong
from simulation.mistakes import Change
from simulation.schedules import SCENARIOS, Failure, run, scenario_of

_MISFITS = (AttributeError, ImportError, NameError, TypeError)


class BugTargetMissing(LookupError):
    """The product does not have the function or constant that a Bug replaces."""


class BrokenBug(RuntimeError):
    """A run ended with an error of the seeded bug itself, not with a broken law."""


@dataclass(frozen=True)
class Bug:
    """A replacement of the target "module:object.attribute", in nc10d, by a wrong value.

    `change` takes the real value and returns the wrong value. `scenarios` can find the bug.
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
    with bug.present():
        for seed in range(begin, begin + count):
            if scenario_of(seed) in bug.scenarios:
                try:
                    run(seed)
                except Failure as failure:
                    _require_broken_law(bug, failure)
                    return failure
    return None


def _require_broken_law(bug: Bug, failure: Failure) -> None:
    for error in failure.errors:
        if isinstance(error, _MISFITS):
            message = f"the seeded bug in {bug.target!r} raises {type(error).__name__}: {error}"
            raise BrokenBug(message) from failure


_STORE = ("store calls",)
_TABLE, _VALUES, _ATTEMPT = "store.table:Table", "store.values:Values", "group.shrink:ShrinkAttempt"
_CONTROL = "backend.cpu.control.group_control:GroupControl"
_CONSENSUS = "backend.cpu.control.consensus:Consensus"
_FORMS, _AGREES = ("group formation",), ("one cause", "shrink")
_VERIFY = "reducer.verify:"
_SHRINKS, _CAUSES = ("shrink",), ("one cause",)

BUGS: dict[str, Bug] = {
    "missing wake-up": Bug(f"{_TABLE}._set", wrong.instead(wrong.silent_set), _STORE),
    "a queue wakes nobody": Bug(f"{_TABLE}._queue_push", wrong.instead(wrong.silent_push), _STORE),
    "dead waiter not forgotten": Bug(
        f"{_TABLE}.forget", wrong.nothing, ("client death", "store calls")
    ),
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
        "store.prefix:PrefixStore.compare_set", wrong.instead(wrong.two_steps), _FORMS
    ),
    "parser waits for a byte too many": Bug(
        "store.wire:Incomplete.__init__", wrong.one_byte_more, _STORE
    ),
    "partial read not continued": Bug(
        "store.connection:StoreConnection._rest", wrong.first_piece, _STORE
    ),
    "partial write not continued": Bug("store.server:Server._watch", wrong.nothing, _STORE),
    "wait not withdrawn": Bug(
        "store.session:StoreSession._has_just_ended", wrong.instead(wrong.not_withdrawn), _STORE
    ),
    "skipped HMAC of frames": Bug(
        "auth.handshake:compare_digest",
        wrong.instead(lambda shown, right: True),
        ("tampering", "unknown client"),
    ),
    "replayed frame accepted": Bug("auth.handshake:FRAME", wrong.ignore_counter, ("tampering",)),
    "caller's proof not checked": Bug(
        "auth.handshake:HandshakeAnswerer._check",
        wrong.instead(wrong.accept_any_proof),
        ("unknown client",),
    ),
    "unknown clients stay": Bug(
        "store.server:Server._poll_timeout", wrong.nothing, ("unknown client",)
    ),
    "differing sizes unnoticed": Bug(
        "init_methods.meeting:_check_agreed", wrong.nothing, ("rendezvous",)
    ),
    "missing rank not named": Bug(
        "init_methods.meeting:Visit._absence", wrong.one_rank_less, ("rendezvous",)
    ),
    "marks of the dead count as consent": Bug(
        "init_methods.meeting:Visit._look", wrong.without_consent, ("rendezvous",)
    ),
    "lives in the marks of the dead": Bug(
        "init_methods.meeting:Visit._check_place", wrong.nothing, ("rendezvous",)
    ),
    "arrival not seen": Bug("store.arrival:wait_for_keys", wrong.never_seen, _FORMS),
    "death not checked": Bug(
        "backend.cpu.membership.formation:check_alive", wrong.nothing, ("group formation",)
    ),
    "own list of survivors": Bug(f"{_ATTEMPT}._decide", wrong.instead(wrong.own_list), _SHRINKS),
    "group not confirmed": Bug(
        f"{_ATTEMPT}.confirm", wrong.instead(wrong.own_confirmation), _SHRINKS
    ),
    "confirmation waits for the dead": Bug(f"{_ATTEMPT}.confirm", wrong.ignore_deaths, _SHRINKS),
    "survivors wait for the dead": Bug(f"{_ATTEMPT}.agree", wrong.ignore_deaths, _SHRINKS),
    "stale epoch": Bug(f"{_ATTEMPT}.__init__", wrong.same_keys, _SHRINKS),
    "first coordinator decides alone": Bug(
        f"{_CONSENSUS}._adopt", wrong.instead(wrong.decides_alone), ("one cause",)
    ),
    "echo not sent": Bug(f"{_CONSENSUS}._adopt", wrong.instead(wrong.no_echo), _AGREES),
    "old round believed": Bug(f"{_CONSENSUS}._adopt", wrong.keep_old_value, _AGREES),
    "last messages of the dead ignored": Bug(
        f"{_CONTROL}._ended", wrong.instead(lambda control, rank: rank in control._gone()), _AGREES
    ),
    "lost abort": Bug(
        "backend.cpu.failure.cause:publish", wrong.instead(wrong.cause_for_itself), _CAUSES
    ),
    "cause overwritten": Bug(
        "backend.cpu.failure.cause:publish", wrong.instead(wrong.last_cause_wins), _CAUSES
    ),
    "every host decides alone": Bug(
        "backend.cpu.failure.cause:AgreedCause.report", wrong.instead(wrong.own_cause), _CAUSES
    ),
    "silent ranks awaited": Bug(f"{_CONTROL}.overdue", wrong.nothing, _CAUSES),
    "partial message forgotten": Bug(
        "backend.cpu.control.connections:ControlConnection.receive", wrong.drop_partial, _CAUSES
    ),
    "names not compared": Bug(
        f"{_VERIFY}_row",
        lambda real: lambda spec, name, order: real(spec, "", order),
        ("same parameters",),
    ),
    "first difference not agreed": Bug(
        f"{_VERIFY}_least", wrong.instead(lambda group, number: number), ("same parameters",)
    ),
}
assert all(name in SCENARIOS for bug in BUGS.values() for name in bug.scenarios)
