"""The check that ranks have the same parameters, before they share buckets, on simulated ranks.

Laws: ranks with the same parameters go on. Otherwise all ranks raise the same error, which names
the first parameter that differs. If a rank dies during the check, others raise no other error than
its loss.
"""

from __future__ import annotations

from random import Random

from nc10d.arrays.dtypes import DType
from nc10d.errors import PeerLost
from nc10d.group.process_group import ProcessGroup
from nc10d.reducer import verify
from nc10d.reducer.plan import Spec
from nc10d.testing.simulated.faults import Kill
from nc10d.testing.simulated.simulated_ranks import SimulatedRanks
from simulation.clock import Simulation
from simulation.laws import require

_LONGEST = 0.003
"""Virtual seconds of a check, or a little more."""


def _change(random: Random, specs: list[Spec], names: list[str]) -> None:
    """Change a rank's parameters in a single place."""
    at = random.randrange(len(specs))
    what = random.choice(("shape", "dtype", "name", "fewer"))
    if what == "shape":
        specs[at] = Spec((*specs[at].shape, 2), specs[at].dtype, "cpu")
    elif what == "dtype":
        specs[at] = Spec(specs[at].shape, DType.FLOAT64, "cpu")
    elif what == "name":
        names[at] += "?"
    else:
        del specs[-1], names[-1]


def verify_parameters(sim: Simulation) -> None:
    """Let ranks compare their parameters."""
    random, size, count = sim.random, sim.random.randint(2, 4), sim.random.randint(1, 5)
    trouble = random.choice(("none", "differ", "killed"))
    victim = random.randrange(size)
    faults = [Kill(victim, random.random() * _LONGEST)] if trouble == "killed" else []

    def compare(group: ProcessGroup) -> str:
        specs = [Spec((i + 1, 2), DType.FLOAT32, "cpu") for i in range(count)]
        names = [f"layer{i}" for i in range(count)]
        if trouble == "differ" and group.rank == victim:
            _change(random, specs, names)
        try:
            verify.verify_parameters(group, specs, names)
        except (ValueError, PeerLost) as error:
            return f"{type(error).__name__}: {error}"
        return "same"

    ends = SimulatedRanks(size, sim.seed, faults=faults).run(compare)
    for rank, end in enumerate(ends):
        sim.note(f"rank {rank} ends: {end}")
    if trouble != "killed":
        require(len({*ends}) == 1, f"ranks end differently: {ends}")
        right = "ValueError" if trouble == "differ" else "same"
        require(ends[0].startswith(right), f"parameters: {trouble}, and ranks end: {ends[0]}")
