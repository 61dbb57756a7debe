"""From a seed to a run: the scenario that it plays, and the Failure of a run that broke a law."""

from __future__ import annotations

from collections.abc import Iterator

from simulation import formation, one_cause, shrinking, store_calls, verify
from simulation.clock import Simulation
from simulation.laws import Scenario

_BOUND = 20.0

SCENARIOS: dict[str, Scenario] = {
    "store calls": store_calls.store_calls,
    "server death": store_calls.server_death,
    "client death": store_calls.client_death,
    "authenticated": store_calls.authenticated,
    "tampering": store_calls.tampering,
    "unknown client": store_calls.unknown_client,
    "rendezvous": formation.rendezvous,
    "group formation": formation.group_formation,
    "shrink": shrinking.shrink_survivors,
    "one cause": one_cause.one_cause,
    "same parameters": verify.verify_parameters,
}
_LONGER = {"shrink": 60.0, "store calls": 30.0, "server death": 180.0, "tampering": 180.0}


class Failure(AssertionError):
    """A run that broke a law: its seed, its trace, and all errors that were raised in it."""

    def __init__(self, seed: int, sim: Simulation, error: BaseException) -> None:
        name = scenario_of(seed)
        super().__init__(
            f"seed {seed} ({name}): {type(error).__name__}: {error}\n"
            f"again: python -m simulation {seed}"
        )
        self.seed, self.name, self.trace = seed, name, sim.trace
        raised = [error, *(actor.error for actor in sim.actors)]
        self.errors = [link for error in raised for link in _chain(error)]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def scenario_of(seed: int) -> str:
    """Return the scenario that a seed plays."""
    return [*SCENARIOS][seed % len(SCENARIOS)]


def run(seed: int, *, verbose: bool = False) -> Simulation:
    """Play a seed's schedule; Failure if a law is broken. `verbose` traces each call to a store."""
    name = scenario_of(seed)
    sim = Simulation(seed, _LONGER.get(name, _BOUND), verbose=verbose)
    try:
        SCENARIOS[name](sim)
    except Exception as error:
        raise Failure(seed, sim, error) from error
    return sim
