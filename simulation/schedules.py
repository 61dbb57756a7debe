"""From an integer to a run: which scenario a seed plays, and what is said when it fails."""

from __future__ import annotations

from simulation import buckets, meeting, one_cause, programs, shrinking, store_calls, verify
from simulation.clock import Simulation, virtual
from simulation.laws import Scenario

_BOUND = 20.0

SCENARIOS: dict[str, Scenario] = {
    "storing": store_calls.storing,
    "dying": store_calls.dying,
    "deserting": store_calls.deserting,
    "sealed": store_calls.sealed,
    "meddled": store_calls.meddled,
    "strange": store_calls.strange,
    "gathering": meeting.gathering,
    "founding": meeting.founding,
    "shrinking": shrinking.shrinking,
    "judging": one_cause.judging,
    "buckets": buckets.buckets,
    "alike": verify.alike,
    "programs": programs.programs,
}
_LONGER = {"shrinking": 60.0, "storing": 30.0, "dying": 180.0, "meddled": 180.0}


class Failure(AssertionError):
    """A run that broke a law: its seed, and what happened in it."""

    def __init__(self, seed: int, name: str, trace: list[str], error: BaseException) -> None:
        super().__init__(
            f"seed {seed} ({name}): {type(error).__name__}: {error}\n"
            f"again: python -m simulation {seed}"
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
