"""What ranks make sure of before they share buckets: they have the same parameters.

Laws: ranks that have the same go on; otherwise all raise the same error, which names the first
parameter that differs. A rank that dies in it is everybody's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from nc10d.arrays.dtypes import DType
from nc10d.errors import PeerLost
from nc10d.reducer import verify
from nc10d.reducer.plan import Spec
from simulation.clock import Signal, Simulation
from simulation.laws import demand, ending, live, same, typed


class Meeting:
    """Where the ranks of a group make their collective calls, one after the other."""

    def __init__(self, sim: Simulation, size: int) -> None:
        self.sim, self.size = sim, size
        self.parts: dict[tuple[int, str], dict[int, Any]] = {}
        self.lost: int | None = None
        self.changed = Signal()


class Group:
    """A rank's group: three collectives, as slow as it pleases."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self._calls = 0

    def _exchange(self, call: str, x: Any) -> list[Any]:
        meeting = self._meeting
        meeting.sim.sleep(meeting.sim.random.random() * 0.01)
        self._calls += 1
        parts = meeting.parts.setdefault((self._calls, call), {})
        parts[self.rank] = np.array(x)
        meeting.changed.notify()
        while len(parts) < self.size:
            if meeting.lost is not None:
                raise PeerLost(f"rank {meeting.lost} is lost", rank=meeting.lost)
            meeting.sim.wait(meeting.changed, math.inf)
        return [parts[rank] for rank in range(self.size)]

    def broadcast(self, x: Any, src: int) -> None:
        """Copy one rank's array to all."""
        x[:] = self._exchange(f"broadcast {x.shape}", x)[src]

    def all_reduce(self, x: Any, op: object) -> None:
        """Reduce to the minimum."""
        x[:] = np.minimum.reduce(self._exchange(f"all_reduce {x.shape}", x))

    def all_gather_into_tensor(self, out: Any, x: Any) -> None:
        """Gather all ranks' arrays."""
        out[:] = np.stack(self._exchange(f"all_gather {x.shape}", x))


def _differing(sim: Simulation, specs: list[Spec], names: list[str]) -> Callable[[], None]:
    """Return what makes a rank's parameters differ from the others' in one place."""
    at = sim.random.randrange(len(specs))

    def shape() -> None:
        specs[at] = Spec((*specs[at].shape, 2), specs[at].dtype, "cpu")

    def dtype() -> None:
        specs[at] = Spec(specs[at].shape, DType.FLOAT64, "cpu")

    def name() -> None:
        names[at] += "?"

    def fewer() -> None:
        del specs[-1], names[-1]

    return sim.random.choice((shape, dtype, name, fewer))


def alike(sim: Simulation) -> None:
    """Ranks compare their parameters."""
    random, size = sim.random, sim.random.randint(2, 4)
    meeting = Meeting(sim, size)
    count = random.randint(1, 5)
    trouble = random.choice(("none", "differ", "killed"))
    victim = random.randrange(size)

    def compare(rank: int) -> str:
        specs = [Spec((i + 1, 2), DType.FLOAT32, "cpu") for i in range(count)]
        names = [f"layer{i}" for i in range(count)]
        if trouble == "differ" and rank == victim:
            _differing(sim, specs, names)()
        group: Any = Group(meeting, rank)
        verify.verify_parameters(group, specs, names)
        return "alike"

    for rank in range(size):
        sim.start(f"rank {rank}", partial(compare, rank))
    if trouble == "killed":

        def die() -> None:
            if not sim.actors[victim].done:
                sim.actors[victim].kill()
                meeting.lost = victim
                meeting.changed.notify()

        sim.after(random.random() * 0.03, die)
    sim.run()
    typed(sim.actors, ValueError, PeerLost)
    told = ending(live(sim.actors)[0])
    if trouble == "killed":
        return
    same(sim.actors)
    right = "ValueError" if trouble == "differ" else "'alike'"
    demand(right in told, f"parameters: {trouble}, and ranks end: {told}")
