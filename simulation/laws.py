"""What a simulated run must keep to: the words in which scenarios state their laws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

from nc10d.errors import DistError
from simulation.clock import Actor, Simulation

Scenario = Callable[[Simulation], None]


class Wrong(AssertionError):
    """A result that is not right, or ranks that do not agree on why they have failed."""


def demand(holds: bool, what: str) -> None:
    """Raise Wrong unless it holds."""
    if not holds:
        raise Wrong(what)


def live(actors: Iterable[Actor]) -> list[Actor]:
    """Return who has not been killed."""
    return [actor for actor in actors if not actor.dead]


def same(actors: Sequence[Actor]) -> None:
    """Demand that all live ranks have ended alike: with equal results, or in the same words."""
    endings = {ending(actor) for actor in live(actors)}
    demand(len(endings) <= 1, f"ranks end differently: {sorted(endings)}")


def ending(actor: Actor) -> str:
    """Return how a rank has ended, in words."""
    error = actor.error
    return f"returned {actor.result!r}" if error is None else f"{type(error).__name__}: {error}"


def typed(actors: Sequence[Actor], *kinds: type[BaseException]) -> None:
    """Demand that ranks fail with errors of these kinds only (by default with a DistError)."""
    for actor in live(actors):
        if actor.error is not None and not isinstance(actor.error, kinds or (DistError,)):
            raise Wrong(f"{actor.name} fails with {ending(actor)}") from actor.error


def in_time(actors: Sequence[Actor], bound: float) -> None:
    """Demand that live ranks have ended by a moment of virtual time."""
    for actor in live(actors):
        demand(
            actor.ended_at <= bound, f"{actor.name} ends {actor.ended_at - bound:.3f} s too late"
        )


def some(random: Random, count: int, most: int) -> list[int]:
    """Return up to `most` different numbers below `count`."""
    return random.sample(range(count), random.randint(0, min(most, count)))
