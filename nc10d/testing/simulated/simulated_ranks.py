"""Ranks that are tasks in a process: `run_ranks(..., kind="simulated")`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nc10d.backend.config import BackendConfig
from nc10d.base.call_site import here
from nc10d.base.deadline import Deadline
from nc10d.errors import DistError
from nc10d.group import world
from nc10d.group.process_group import ProcessGroup
from nc10d.store.local import LocalStore
from nc10d.store.values import Values
from nc10d.testing.outcomes import KILLED, Outcome, returning_frames
from nc10d.testing.rank_workers import failed
from nc10d.testing.ranks import Ranks
from nc10d.testing.simulated.faults import ClockJump, Fault, FaultsOfSeed, Kill, Partition, Pause
from nc10d.testing.simulated.orders import OrderedHub, OrderedScheduler
from nc10d.testing.simulated.simulated_backend import SimulatedBackend
from nc10d.testing.simulated.simulated_network import SimulatedHub
from nc10d.testing.simulated.virtual_time import Choose, Killed, Scheduler

T = TypeVar("T")
V = TypeVar("V")


class SimulatedStore(LocalStore):
    """A simulated job's store; a wait takes virtual time."""

    def __init__(self, hub: SimulatedHub) -> None:
        self._hub = hub
        self._values = Values()

    def _exclusively(self, act: Callable[[Values], V]) -> V:
        self._hub.scheduler.give_way("store")
        result = act(self._values)
        self._hub.scheduler.wake_all(self._hub.changed)
        return result

    def _until(self, ready: Callable[[Values], V | None], deadline: Deadline) -> V | None:
        self._hub.scheduler.give_way("store")
        found: list[V] = []

        def look() -> bool:
            value = ready(self._values)
            found.extend([] if value is None else [value])
            return bool(found)

        hub, task = self._hub, self._hub.scheduler.current()
        assert task is not None, "only simulated ranks use this store"
        hub.waits[task.number] = f"a store's key at {here()}"
        try:
            hub.scheduler.wait(look, deadline.at, hub.changed)
        finally:
            hub.waits.pop(task.number, None)
        hub.scheduler.wake_all(hub.changed)
        return found[0] if found else None

    def _name(self) -> str:
        return "SimulatedStore()"

    def clone(self) -> SimulatedStore:
        """Return this store: a single rank runs at a time."""
        return self


class SimulatedRanks(Ranks):
    """Ranks whose every run is a new job in virtual time; `seed` decides everything.

    With `choose` there are no delays: `choose` decides the steps' order, see nc10d.testing.explore.
    """

    def __init__(
        self,
        world_size: int,
        seed: int = 0,
        timeout: float = 30.0,
        faults: Sequence[Fault] = (),
        choose: Choose | None = None,
        sync_sends: bool | None = None,
    ) -> None:
        super().__init__(world_size, "threads", "simulated", timeout)
        self.kind = "simulated"
        self._choose = choose
        by_variable = os.environ.get("NC10D_SYNC_SENDS") == "1"
        self._sync_sends = by_variable if sync_sends is None else sync_sends
        self.plan(seed, faults)

    def plan(self, seed: int, faults: Sequence[Fault]) -> None:
        """Give the next runs a seed, and faults."""
        self.seed, self._faults = seed, faults
        self._described = f"simulated tasks, seed {seed}"
        for fault in faults:
            ranks = fault.ranks if isinstance(fault, Partition) else [fault.rank]
            if not all(0 <= rank < self.world_size for rank in ranks) or fault.at < 0:
                last = self.world_size - 1
                raise ValueError(f"{fault}: ranks are 0 to {last}, times not negative")

    def renew(self) -> None:
        """Do nothing: every run has new ranks."""

    def run(self, function: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
        """Call function(group, *row) on every rank, in virtual time; return the results by rank.

        A rank that a fault has killed has the result None.
        """
        if any(len(column) != self.world_size for column in columns):
            raise ValueError(f"each column needs {self.world_size} entries, one a rank")
        hub = self._new_hub()
        scheduler = hub.scheduler
        scheduler.stuck = hub.stuck
        store = SimulatedStore(hub)
        outcomes: list[Outcome | None] = [None] * self.world_size

        def main(rank: int) -> None:
            row = [column[rank] for column in columns]
            with world.own_world():
                outcomes[rank] = self._play(hub, store, rank, function, row)

        for fault in self._faults:
            _plan(hub, fault)
        scheduler.run([partial(main, rank) for rank in range(self.world_size)])
        if not all(outcome is not None and outcome.done for outcome in outcomes):
            raise self._error(outcomes, [])
        values: list[Any] = [outcome.value for outcome in outcomes if outcome is not None]
        found: list[Any] = [None if value is KILLED else value for value in values]
        return found

    def _new_hub(self) -> SimulatedHub:
        if self._choose is not None:
            return OrderedHub(OrderedScheduler(self._choose), self._sync_sends)
        draw = random.Random(self.seed).randrange
        scheduler = Scheduler(lambda labels: draw(len(labels)))
        return SimulatedHub(scheduler, self.seed, self._faults, self._sync_sends)

    def _play(
        self,
        hub: SimulatedHub,
        store: SimulatedStore,
        rank: int,
        function: Callable[..., Any],
        row: Sequence[Any],
    ) -> Outcome:
        timeout = self._options["timeout"]
        own = world.current_world()
        hub.worlds[rank] = own
        group = ProcessGroup(
            "world",
            range(self.world_size),
            rank,
            store,
            timeout,
            BackendConfig(SimulatedBackend.name),
            options=hub,
        )
        try:
            own.default = own.add(group, Deadline.after(timeout))
            result = function(group, *row)
            frames = returning_frames(function, row)
            hub.returned[rank] = frames[-1].site if frames else ""
            return Outcome(True, result, frames)
        except Killed:
            return Outcome(True, KILLED)
        except BaseException as error:  # noqa: BLE001  (the report shows any error)
            if not isinstance(error, DistError):
                for each in [*own.groups.values()]:
                    each.abort(f"rank {each.rank} raised {type(error).__name__}: {error}")
            return failed(error)


def _plan(hub: SimulatedHub, fault: Fault) -> None:
    scheduler = hub.scheduler

    def happen() -> None:
        if isinstance(fault, Kill):
            hub.kill(fault.rank, f"killed by the plan at {fault.at:g} s")
        elif isinstance(fault, Pause):
            scheduler.pause(fault.rank, fault.seconds)
        elif isinstance(fault, ClockJump):
            scheduler.tasks[fault.rank].skew += fault.seconds

    if not isinstance(fault, Partition):  # the network looks at those itself
        scheduler.at(fault.at, happen)


class SeededRanks(SimulatedRanks):
    """Simulated ranks whose every run is a run for each seed; `faults` may depend on the seed."""

    def __init__(
        self,
        world_size: int,
        seeds: Sequence[int],
        timeout: float,
        faults: Sequence[Fault] | FaultsOfSeed,
        sync_sends: bool | None = None,
    ) -> None:
        super().__init__(world_size, 0, timeout, sync_sends=sync_sends)
        if not seeds:
            raise ValueError("expected at least one seed")
        self._seeds, self._faults_of = seeds, faults

    def run(self, function: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
        """Call function(group, *row) on every rank, with every seed; return the last results."""
        results: list[T] = []
        for seed in self._seeds:
            faults = self._faults_of
            self.plan(seed, faults(seed) if callable(faults) else faults)
            results = super().run(function, *own_arrays(columns))
        return results


def own_arrays(value: Any) -> Any:
    """Return a value whose arrays, in lists and tuples too, are copies: a rank may write there."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(map(own_arrays, value))
    return value
