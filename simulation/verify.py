"""The check that ranks have the same parameters, before they share buckets.

Laws: ranks with the same parameters go on. Otherwise all ranks raise the same error, which names
the first parameter that differs. If a rank dies during the check, all others raise.
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
from simulation.laws import ending, live, require, require_same, require_types


class CollectiveExchange:
    """The inputs of all ranks of a group to each of their collective calls."""

    def __init__(self, sim: Simulation, size: int) -> None:
        self.sim, self.size = sim, size
        self.parts: dict[tuple[int, str], dict[int, Any]] = {}
        self.lost: int | None = None
        self.changed = Signal()


class FakeGroup:
    """A rank's group: three collectives with random delays."""

    def __init__(self, exchange: CollectiveExchange, rank: int) -> None:
        self._shared, self.rank, self.size = exchange, rank, exchange.size
        self._calls = 0

    def _exchange(self, call: str, x: Any) -> list[Any]:
        exchange = self._shared
        exchange.sim.sleep(exchange.sim.random.random() * 0.01)
        self._calls += 1
        parts = exchange.parts.setdefault((self._calls, call), {})
        parts[self.rank] = np.array(x)
        exchange.changed.notify()
        while len(parts) < self.size:
            if exchange.lost is not None:
                raise PeerLost(f"rank {exchange.lost} is lost", rank=exchange.lost)
            exchange.sim.wait(exchange.changed, math.inf)
        return [parts[rank] for rank in range(self.size)]

    def broadcast(self, x: Any, src: int) -> None:
        """Copy the array of `src` to all ranks."""
        x[:] = self._exchange(f"broadcast {x.shape}", x)[src]

    def all_reduce(self, x: Any, op: object) -> None:
        """Reduce to the minimum."""
        x[:] = np.minimum.reduce(self._exchange(f"all_reduce {x.shape}", x))

    def all_gather_into_tensor(self, out: Any, x: Any) -> None:
        """Gather all ranks' arrays."""
        out[:] = np.stack(self._exchange(f"all_gather {x.shape}", x))


def _differing(sim: Simulation, specs: list[Spec], names: list[str]) -> Callable[[], None]:
    """Return a function that changes a rank's parameters in a single place."""
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


def verify_parameters(sim: Simulation) -> None:
    """Let ranks compare their parameters."""
    random, size = sim.random, sim.random.randint(2, 4)
    exchange = CollectiveExchange(sim, size)
    count = random.randint(1, 5)
    trouble = random.choice(("none", "differ", "killed"))
    victim = random.randrange(size)

    def compare(rank: int) -> str:
        specs = [Spec((i + 1, 2), DType.FLOAT32, "cpu") for i in range(count)]
        names = [f"layer{i}" for i in range(count)]
        if trouble == "differ" and rank == victim:
            _differing(sim, specs, names)()
        group: Any = FakeGroup(exchange, rank)
        verify.verify_parameters(group, specs, names)
        return "same"

    for rank in range(size):
        sim.start(f"rank {rank}", partial(compare, rank))
    if trouble == "killed":

        def die() -> None:
            if not sim.actors[victim].done:
                sim.actors[victim].kill()
                exchange.lost = victim
                exchange.changed.notify()

        sim.after(random.random() * 0.03, die)
    sim.run()
    require_types(sim.actors, ValueError, PeerLost)
    first = ending(live(sim.actors)[0])
    if trouble == "killed":
        return
    require_same(sim.actors)
    right = "ValueError" if trouble == "differ" else "'same'"
    require(right in first, f"parameters: {trouble}, and ranks end: {first}")
