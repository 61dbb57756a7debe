"""Checks in which the scenarios of the simulation state their laws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

from nc10d.errors import DistError
from simulation.clock import Actor, Simulation

Scenario = Callable[[Simulation], None]


class LawBroken(AssertionError):
    """A wrong result, or ranks that fail for different reasons."""


def require(holds: bool, message: str) -> None:
    """Raise LawBroken with the message unless `holds`."""
    if not holds:
        raise LawBroken(message)


def live(actors: Iterable[Actor]) -> list[Actor]:
    """Return the ranks that have not been killed."""
    return [actor for actor in actors if not actor.dead]


def require_same(actors: Sequence[Actor]) -> None:
    """Require that all live ranks have equal results, or the same error with the same message."""
    endings = {ending(actor) for actor in live(actors)}
    require(len(endings) <= 1, f"ranks end differently: {sorted(endings)}")


def ending(actor: Actor) -> str:
    """Return a text about a rank's result or error."""
    error = actor.error
    return f"returned {actor.result!r}" if error is None else f"{type(error).__name__}: {error}"


def require_types(actors: Sequence[Actor], *kinds: type[BaseException]) -> None:
    """Require that live ranks fail with errors of these kinds only (by default a DistError)."""
    for actor in live(actors):
        if actor.error is not None and not isinstance(actor.error, kinds or (DistError,)):
            raise LawBroken(f"{actor.name} fails with {ending(actor)}") from actor.error


def require_by(actors: Sequence[Actor], bound: float) -> None:
    """Require that live ranks have ended by a moment of virtual time."""
    for actor in live(actors):
        require(
            actor.ended_at <= bound, f"{actor.name} ends {actor.ended_at - bound:.3f} s too late"
        )


def sample(random: Random, count: int, most: int) -> list[int]:
    """Return up to `most` different numbers below `count`."""
    return random.sample(range(count), random.randint(0, min(most, count)))
