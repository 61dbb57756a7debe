"""Many orders of a function's steps: all orders where they are few, else a choice.

Where all orders are too many, half the runs have the fewest deviations from the first order, in
which ranks take turns (delay bounding: Emmi, Qadeer, Rakamaric, 2011). The other half give ranks
and messages random priorities, which change at two random steps (PCT: Burckhardt, Kothari,
Musuvathi, Nagarakatte, 2010; with messages: Ozkan et al., 2018).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from nc10d.testing.simulated.orders import OrderedScheduler
from nc10d.testing.simulated.simulated_network import SimulatedHub
from nc10d.testing.simulated.simulated_ranks import SimulatedRanks, own_arrays
from nc10d.testing.simulated.virtual_time import Choose, Label

CHANGES = 2
"""Priority changes in a run: bugs that need three steps in a certain order are found."""
LONGEST = 10
"""The last change is before step 2**LONGEST; the exponent is uniform, as lengths differ."""
MOST_STEPS = 8
"""Most steps that a failure's note lists: the last steps."""
MOST_TURNS = 50
"""Times that a step comes before others in a row until it loses its priority."""


class Explored(NamedTuple):
    """The number of orders that were run, and whether these were all."""

    orders: int
    complete: bool


def explore(
    function: Callable[..., object],
    world_size: int,
    *columns: Sequence[object],
    most: int = 1000,
    timeout: float = 30.0,
    choices: Sequence[int] | None = None,
) -> Explored:
    """Run function(group, *row) in every order of steps that the program can see.

    At most `most` orders are run; where half of these are not all, the others have random
    priorities. The first order that fails raises, with notes of its choices and its last steps:
    with the choices, `choices` runs that order alone. Ranks must share nothing but messages and the
    store. A function on two or three ranks with up to ten messages or accesses to the store has few
    enough orders to run all.
    """
    ranks = ExploringRanks(world_size, timeout, most=most, choices=choices)
    ranks.run(function, *columns)
    return ranks.explored


class ExploringRanks(SimulatedRanks):
    """Simulated ranks whose every run is one run for each order."""

    def __init__(
        self,
        world_size: int,
        timeout: float = 30.0,
        sync_sends: bool | None = None,
        most: int = 1000,
        choices: Sequence[int] | None = None,
    ) -> None:
        super().__init__(world_size, 0, timeout, sync_sends=sync_sends)
        if most < 1:
            raise ValueError(f"expected at least one order, got {most}")
        self._most, self._given = most, choices
        self.explored = Explored(0, False)
        self._scheduler: OrderedScheduler | None = None

    def run(self, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """Call function(group, *row) on every rank in every order; return the last results."""
        if self._given is not None:
            self.explored = Explored(1, False)
            return self._run_as(Prefix(self._given), "one order", function, columns)
        deviations = Deviations()
        half = max(1, self._most // 2)
        results: list[Any] = []
        for count in range(1, self._most + 1):
            prefix = deviations.next() if count <= half else None
            choose = Recorded(Priorities(count)) if prefix is None else Prefix(prefix)
            results = self._run_as(choose, f"order {count}", function, columns)
            if prefix is not None:
                deviations.note(choose.taken, len(prefix))
            self.explored = Explored(count, not deviations)
            if not deviations:
                break
        return results

    def _run_as(
        self, choose: Recorded, name: str, function: Callable[..., object], columns: object
    ) -> list[Any]:
        self._choose = choose
        self._described = f"simulated tasks, {name}"
        try:
            return super().run(function, *own_arrays(columns))
        except BaseException as error:
            while choose.taken and choose.taken[-1][0] == 0:
                choose.taken.pop()
            error.add_note(f"{name}: choices={[place for place, _ in choose.taken]}")
            steps = [] if self._scheduler is None else self._scheduler.story
            left_out = [f"... {len(steps) - MOST_STEPS} steps"] if steps[MOST_STEPS:] else []
            error.add_note("\n".join(["its order:", *left_out, *steps[-MOST_STEPS:]]))
            raise

    def _new_hub(self) -> SimulatedHub:
        hub = super()._new_hub()
        assert isinstance(hub.scheduler, OrderedScheduler), "it has a function that chooses"
        self._scheduler = hub.scheduler
        return hub


class Recorded:
    """Chooses as another function does, and records the choices."""

    def __init__(self, choose: Choose) -> None:
        self._choose_next = choose
        self.taken: list[tuple[int, int]] = []
        """Each choice, and the number of possibilities."""

    def __call__(self, labels: Sequence[Label]) -> int:
        """Choose as `Choose` says."""
        place = self._choose_next(labels)
        self.taken.append((place, len(labels)))
        return place


class Prefix(Recorded):
    """Makes given choices, and then the first possibility each time."""

    def __init__(self, choices: Sequence[int]) -> None:
        given: Iterator[int] = iter(choices)
        super().__init__(lambda labels: min(next(given, 0), len(labels) - 1))


class Deviations:
    """The choices' prefixes that are still to be run; the fewest deviations come first."""

    def __init__(self) -> None:
        self._left: list[tuple[int, int, list[int]]] = [(0, 0, [])]
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._left)

    def next(self) -> list[int]:
        """Return a prefix."""
        return heapq.heappop(self._left)[2]

    def note(self, taken: Sequence[tuple[int, int]], known: int) -> None:
        """Add the prefixes that deviate from a run after the first `known` choices."""
        places = [place for place, _ in taken]
        deviations = sum(place > 0 for place in places)
        for index in range(known, len(taken)):
            for other in range(1, taken[index][1]):
                self._count += 1
                prefix = [*places[:index], other]
                heapq.heappush(self._left, (deviations + 1, self._count, prefix))


class Priorities:
    """Chooses the step with the highest priority, which is random, and changes at random steps."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changes = {int(2 ** self._random.uniform(0, LONGEST)) for _ in range(CHANGES)}
        self._of: dict[Label, float] = {}
        self._step = self._turns = 0
        self._last: Label = None

    def __call__(self, labels: Sequence[Label]) -> int:
        """Choose as `Choose` says."""
        for label in labels:
            self._of.setdefault(label, self._random.random())
        self._step += 1
        best = self._best(labels)
        self._turns = self._turns + 1 if labels[best] == self._last else 0
        if self._step in self._changes or self._turns > MOST_TURNS:
            self._of[labels[best]] = -float(self._step)
            best, self._turns = self._best(labels), 0
        self._last = labels[best]
        return best

    def _best(self, labels: Sequence[Label]) -> int:
        return max(range(len(labels)), key=lambda place: self._of[labels[place]])
