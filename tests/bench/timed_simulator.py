"""The simulator with a clock for each rank: each step has a price; the last rank's time counts.

It runs real data through the simulator's ranks, independently of benchmarks.model.timed_walk.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

import numpy as np

from benchmarks.model.collective_programs import Collective
from benchmarks.model.machine import Machine, Uses, at_reach
from nc10d.backend.cpu.algorithms.group_shape import Topology
from nc10d.backend.cpu.native.offsets import WRITES
from nc10d.backend.cpu.program.program import Program, Space, Step, StepKind
from simulation.race_simulator.hosts import Cluster, FarRank, HostWorld, Pipes
from simulation.race_simulator.vector_clocks import Bytes

WAITS = (
    StepKind.WAIT,
    StepKind.WAIT_ALL,
    StepKind.MEET_ALL,
    StepKind.FREE,
    StepKind.BRANCH_IF_FLAGGED,
)
NOTHING = (StepKind.JUMP, StepKind.LOOP)
ROOM = 1 << 40
uses = functools.cache(Uses.of)


class TimedRank(FarRank):
    """A rank with a clock; `times` has the times of its signals.

    `freed` are the ranks that may continue after its last step.
    """

    world: TimedHost

    def __init__(self, world: TimedHost, rank: int) -> None:
        super().__init__(world, rank)
        self.now = 0.0
        self.times = [0.0]
        self.heard: list[float] = []
        self.freed: Sequence[int] = ()
        self.sent_until: float | None = None
        self.pushed: dict[int, float] = {}
        self.taken: dict[int, int] = {}

    def reached(self, peer: int, target: int) -> bool:
        found = super().reached(peer, target)
        if found:
            other = self.world.ranks[peer]
            assert isinstance(other, TimedRank)
            values = [value for value, _ in other.releases]
            first = next(i for i, value in enumerate(values) if value >= target)
            self.heard.append(other.times[first] + (self.machine.wait if target > 0 else 0.0))
        return found

    @property
    def machine(self) -> Machine:
        return self.world.machine

    def step(self) -> bool:
        steps = self.queue[0][0].steps
        if self.pc == len(steps):
            return super().step()
        step, nbytes = steps[self.pc], self.length(steps[self.pc])
        rows = steps[self.pc + 1 : self.pc + 1 + step.rows]
        amounts = [self.length(row) for row in rows]
        if rows and self.sent_until is None:
            self.sent_until = self._send(rows, amounts)
        self.heard = []
        if step.kind is StepKind.EXPOSE:
            self.world.expose(step)
        if not super().step():
            return False
        if rows:
            self._take(rows, amounts)
        elif step.kind in WAITS:
            self.now = max(self.now + self.machine.step, *self.heard, 0.0)
        elif step.kind not in NOTHING:
            moved = nbytes
            if step.kind is StepKind.FETCH:  # bytes of an exposed array need no copy
                moved -= min(moved, max(0, self.writable - step.offset))
            if step.kind is StepKind.FILL_EXPOSED:
                peers = (peer for peer in self.world.ranks if peer is not self)
                moved = sum(min(moved, peer.writable) for peer in peers)
            size, arrays = self.world.size, self.world.arrays
            busy = self.machine.price(step, moved, self.rank, size, arrays, uses(steps))
            for peer, until in self.pushed.items():
                if until > self.now:  # a rank that folds does not send
                    flights = self.world.flights[self.number, peer]
                    flights[-1] = (*flights[-1][:2], until + busy)
                    self.pushed[peer] += busy
            self.now += busy
        if step.kind is StepKind.SIGNAL:
            self.times.append(self.now)
            self.freed = self.world.numbers
        return True

    def _send(self, rows: Sequence[Step], amounts: Sequence[int]) -> float:
        new = [
            (row.peer, nbytes)
            for row, nbytes in zip(rows, amounts, strict=True)
            if row.kind is not StepKind.TAKE and row.peer not in self.pushed
        ]
        begin = max(self.now, self.world.network)
        both_ways = any(row.kind is StepKind.TAKE for row in rows)
        total = sum(nbytes for _, nbytes in new)
        reach = max(self.world.arrays, total + max((nbytes for _, nbytes in new), default=0))
        through = begin + self.machine.sent(total, reach, both_ways=both_ways)
        if self.machine.shared:
            shared, rate = self.world.shared, at_reach(self.machine.shared, reach)
            shared.append(max(begin, shared[-1]) + total * rate)
            through = max(through, shared[-1])
        until = through + self.machine.send * len(new)
        for peer, nbytes in new:
            self.world.flights.setdefault((self.number, peer), []).append((nbytes, begin, until))
            self.pushed[peer] = until
        self.freed = [peer for peer, _ in new]
        self.world.network = through if new else self.world.network
        given = [self.pushed.pop(row.peer) for row in rows if row.kind is StepKind.GIVE]
        return max(given, default=self.now)

    def _take(self, rows: Sequence[Step], amounts: Sequence[int]) -> None:
        assert self.sent_until is not None
        ends, count = [self.now, self.sent_until], 0
        for row, nbytes in zip(rows, amounts, strict=True):
            if row.kind is StepKind.TAKE:
                count += 1
                last = self.taken[row.peer] = self.taken.get(row.peer, 0) + nbytes
                ends.append(self._left(row.peer, last) + self.machine.hop)
        self.now = max(ends) + max(0, count - 1) * self.machine.send
        self.sent_until = None

    def _left(self, peer: int, last: int) -> float:
        """Return when the byte number `last` of all that a peer has sent me left it."""
        for nbytes, begin, until in self.world.flights[peer, self.number]:
            if last <= nbytes:
                return begin + (last / nbytes if nbytes else 1.0) * (until - begin)
            last -= nbytes
        raise AssertionError("taken, and never sent")


class TimedHost(HostWorld):
    """A host whose ranks have clocks, and its network; all hosts share `shared`."""

    def __init__(
        self, ranks: Sequence[int], slot: int, pipes: Pipes, machine: Machine, arrays: float
    ) -> None:
        self.machine = machine
        self.arrays = arrays
        self.network = 0.0
        self.shared = [0.0]
        self.flights: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
        super().__init__(ranks, slot, pipes)

    def make_rank(self, rank: int) -> TimedRank:
        return TimedRank(self, rank)

    def expose(self, step: Step) -> None:
        """Let peers read ordinary arrays in a step, if the kernel grants the access."""
        readable = 0 < step.access <= self.machine.access
        self.unreadable = frozenset(() if readable else range(self.size))
        writable = readable and self.machine.access == WRITES
        self.keeping = frozenset(() if writable else range(self.size))


class TimedCluster(Cluster):
    """Ranks with clocks on hosts; the earliest goes first."""

    def __init__(self, hosts: Topology, slot: int, machine: Machine, arrays: float) -> None:
        self.pipes = Pipes(ROOM)
        worlds = [TimedHost(ranks, slot, self.pipes, machine, arrays) for ranks in hosts.hosts]
        for world in worlds:
            world.flights, world.shared = worlds[0].flights, worlds[0].shared
        self.ranks = [
            worlds[host].ranks[local]
            for host, local in (hosts.places[r] for r in range(hosts.size))
        ]

    def last(self) -> float:
        """Run everything; return when the last rank was done."""
        ready = [(0.0, number) for number in range(len(self.ranks))]
        stuck: set[int] = set()
        while ready:
            _, number = heapq.heappop(ready)
            rank = self.ranks[number]
            assert isinstance(rank, TimedRank)
            if not rank.step():
                stuck.add(number)
            elif not rank.idle():
                heapq.heappush(ready, (self.now(number), number))
            for other in stuck.intersection(rank.freed):
                stuck.remove(other)
                heapq.heappush(ready, (self.now(other), other))
            rank.freed = ()
        assert not stuck, stuck
        return max(map(self.now, range(len(self.ranks))))

    def now(self, number: int) -> float:
        rank = self.ranks[number]
        assert isinstance(rank, TimedRank)
        return rank.now


def arrays_of(program: Program) -> list[Bytes]:
    """Return arrays of ones in the sizes that a program needs."""
    need = [4] * program.users
    for step in program.steps:
        for at in (step.dst, step.src, step.own, step.also):
            if at.space is Space.USER:
                far = max(step.nbytes, step.total) if at.stride else step.nbytes
                need[at.index] = max(need[at.index], at.offset + far)
    return [np.ones(-(-nbytes // 4), np.float32).view(np.uint8) for nbytes in need]


def simulated(machine: Machine, collective: Collective) -> float:
    """Return the simulated seconds of a call on all ranks."""
    slot = collective.layout.slot_bytes
    cluster = TimedCluster(collective.hosts, slot, machine, collective.arrays)
    for number, rank in enumerate(cluster.ranks):
        assert isinstance(rank, TimedRank)
        program = collective.program(number)
        cluster.submit(number, program, arrays_of(program))
        rank.now = machine.call(collective.op)
    return cluster.last()
