"""From an integer to a run: which scenario a seed plays, and what is said when it fails."""

from __future__ import annotations

from nc10d.testing.simulation import alike, buckets, judging, meeting, programs, shrinking, storing
from nc10d.testing.simulation.clock import Simulation, virtual
from nc10d.testing.simulation.laws import Scenario

_BOUND = 20.0

SCENARIOS: dict[str, Scenario] = {
    "storing": storing.storing,
    "dying": storing.dying,
    "deserting": storing.deserting,
    "sealed": storing.sealed,
    "meddled": storing.meddled,
    "strange": storing.strange,
    "gathering": meeting.gathering,
    "founding": meeting.founding,
    "shrinking": shrinking.shrinking,
    "judging": judging.judging,
    "buckets": buckets.buckets,
    "alike": alike.alike,
    "programs": programs.programs,
}
_LONGER = {"shrinking": 60.0, "storing": 30.0, "dying": 180.0, "meddled": 180.0}


class Failure(AssertionError):
    """A run that broke a law: its seed, and what happened in it."""

    def __init__(self, seed: int, name: str, trace: list[str], error: BaseException) -> None:
        super().__init__(
            f"seed {seed} ({name}): {type(error).__name__}: {error}\n"
            f"again: python -m nc10d.testing.simulation {seed}"
        )
        self.seed, self.name, self.trace = seed, name, trace


def scenario_of(seed: int) -> str:
    """Return the scenario that a seed plays."""
    return [*SCENARIOS][seed % len(SCENARIOS)]


def play(seed: int, *, verbose: bool = False) -> Simulation:
    """Play a seed's schedule inside `virtual()`; Failure if a law is broken."""
    name = scenario_of(seed)
    sim = Simulation(seed, _LONGER.get(name, _BOUND), verbose=verbose)
    try:
        SCENARIOS[name](sim)
    except Exception as error:
        raise Failure(seed, name, sim.trace, error) from error
    return sim


def run(seed: int, *, verbose: bool = False) -> Simulation:
    """Play one schedule; Failure if a law is broken. `verbose` traces each call to a store."""
    with virtual():
        return play(seed, verbose=verbose)
