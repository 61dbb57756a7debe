"""Walks programs with a clock for each rank: the begin and end of each step on a machine.

No data move. A rank's clock advances by the price of each step; a wait ends when the signal that it
needs arrives. Between hosts, bytes leave through each host's network, flow after flow.

Not all ranks of a group need be walked. A rank that is left out counts as sending at the moments at
which the receiver sends. So a single host can represent all hosts that behave alike.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.model.machine import Machine, Uses, at_reach
from nc10d.backend.cpu.algorithms.group_shape import Topology
from nc10d.backend.cpu.native.offsets import WRITES
from nc10d.backend.cpu.program.program import Program, Step, StepKind


@dataclass(frozen=True, slots=True)
class Event:
    """A step as it happened, in a rank's call number `turn`.

    `causes` are pairs (rank, time). For a wait they are the signalling ranks and the times of their
    signals; for received bytes, the sender and the time at which the bytes began to leave.
    """

    rank: int
    turn: int
    step: Step
    begin: float
    end: float
    nbytes: int
    causes: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class _Host:
    """Shared by a host's ranks: rounds in which some array can't be read, and the network."""

    ranks: Sequence[int]
    flagged: set[int] = field(default_factory=set)
    network: float = 0.0


class Stuck(Exception):
    """Ranks wait for each other, or for a rank that was left out."""


class Walk:
    """The walk of some ranks' programs, each of which is called `turns` times in a row.

    `events` are recorded if `trace` is set; `ends` has the end times of each rank's calls; `shared`
    is the time until which the network that all hosts share is busy.
    """

    def __init__(
        self,
        machine: Machine,
        hosts: Topology,
        programs: Mapping[int, Program],
        arrays: float,
        turns: int = 1,
        *,
        trace: bool = False,
    ) -> None:
        self.machine = machine
        self.arrays = arrays
        self.turns = turns
        self.trace = trace
        self.events: list[Event] = []
        self.flights: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
        self.shared = 0.0
        self._hosts = [_Host(ranks) for ranks in hosts.hosts]
        self.walkers = {
            rank: Walker(self, rank, self._hosts[hosts.host_of(rank)], program)
            for rank, program in programs.items()
        }
        self._waiting: dict[int, list[Walker]] = {}
        self._ready: list[tuple[float, int]] = []

    @property
    def ends(self) -> dict[int, list[float]]:
        """End times of each rank's calls."""
        return {rank: walker.ends for rank, walker in self.walkers.items()}

    def run(self) -> None:
        """Walk all programs to their ends; Stuck if some never end."""
        self._ready = [(0.0, rank) for rank in self.walkers]
        while self._ready:
            # The earliest first, so that bytes go through a network in the order of their times.
            _, rank = heapq.heappop(self._ready)
            walker = self.walkers[rank]
            awaited = walker.go()
            if awaited is not None:
                self._waiting.setdefault(awaited, []).append(walker)
            elif walker.turn < self.turns:
                heapq.heappush(self._ready, (walker.now, rank))
        if any(self._waiting.values()):
            raise Stuck({at: [w.rank for w in waiting] for at, waiting in self._waiting.items()})

    def woken(self, rank: int) -> None:
        """Continue the walkers that wait for `rank`: it has sent or signalled."""
        for walker in self._waiting.pop(rank, ()):
            heapq.heappush(self._ready, (walker.now, walker.rank))


class Walker:
    """A rank's clock and place in its program."""

    def __init__(self, walk: Walk, rank: int, host: _Host, program: Program) -> None:
        self.walk = walk
        self.rank = rank
        self.program = program
        self.now = 0.0
        self.turn = 0
        self.ends: list[float] = []
        self._host = host
        self._place = host.ranks.index(rank)
        self._uses = Uses.of(program.steps)
        self._signals: list[tuple[int, float]] = [(0, 0.0)]
        self._free_at = [0, 0]
        self._seq = self._round = self._pc = self._segment = 0
        # Of the current flow: when the sent bytes have left, and when received bytes have arrived.
        self._gone: float | None = None
        self._arrived: list[float] = []
        self._pushed: dict[int, float] = {}
        self._taken: dict[int, int] = {}
        self._called = False
        self._writable = 0

    def go(self) -> int | None:
        """Do a step; return None, or the rank that this step waits for."""
        if not self._called:
            self.now += self.walk.machine.call(self.program.call.op)
            self._called = True
        step = self.program.steps[self._pc]
        awaited = _DO.get(step.kind, Walker._busy)(self, step)
        if awaited is None:
            self._pc += 1
            if self._pc == len(self.program.steps):
                self.ends.append(self.now)
                self.turn += 1
                self._pc, self._called = 0, False
        return awaited

    def since(self, target: int) -> float | None:
        """Return when this rank's counter reached `target`; None if it has not."""
        if self._signals[-1][0] < target:
            return None
        return self._signals[bisect_left(self._signals, (target, -1.0))][1]

    def _note(
        self,
        step: Step,
        begin: float,
        end: float,
        nbytes: int = 0,
        causes: Sequence[tuple[int, float]] = (),
    ) -> None:
        if self.walk.trace:
            event = Event(self.rank, self.turn, step, begin, end, nbytes, tuple(causes))
            self.walk.events.append(event)

    def _length(self, step: Step) -> int:
        if step.kind is StepKind.FETCH:  # the peer puts bytes into the exposed array itself
            return step.nbytes - min(step.nbytes, max(0, self._writable - step.offset))
        if step.kind is StepKind.FILL_EXPOSED:
            peers = (self.walk.walkers[rank] for rank in self._host.ranks if rank != self.rank)
            return sum(min(step.nbytes, peer._writable) for peer in peers)
        if not step.total:
            return step.nbytes
        return max(0, min(step.nbytes, step.total - self._segment * step.nbytes))

    def _busy(self, step: Step) -> None:
        begin, nbytes = self.now, self._length(step)
        size, arrays = len(self._host.ranks), self.walk.arrays
        price = self.walk.machine.price
        self.now += price(step, nbytes, self._place, size, arrays, self._uses)
        self._hold_up(begin, self.now - begin)
        self._note(step, begin, self.now, nbytes)

    def _hold_up(self, since: float, busy: float) -> None:
        """Delay bytes that have not left yet: a busy core does not send."""
        for peer, gone in self._pushed.items():
            if gone > since:
                flights = self.walk.flights[self.rank, peer]
                flights[-1] = (*flights[-1][:2], gone + busy)
                self._pushed[peer] = gone + busy

    def _signal(self, step: Step) -> None:
        self._busy(step)
        self._signals.append((self._seq + step.tick, self.now))
        self.walk.woken(self.rank)

    def _wait(self, step: Step) -> int | None:
        return self._reach(step, [self._host.ranks[step.peer]], self._seq + step.tick)

    def _wait_all(self, step: Step) -> int | None:
        return self._reach(step, self._host.ranks, self._seq + step.tick)

    def _free(self, step: Step) -> int | None:
        return self._reach(step, self._host.ranks, self._free_at[self._round & 1])

    def _reach(self, step: Step, peers: Sequence[int], target: int) -> int | None:
        causes = []
        for peer in peers:
            if peer == self.rank:
                continue
            since = self.walk.walkers[peer].since(target)
            if since is None:
                return peer
            causes.append((peer, since))
        begin = self.now
        last = max((since for _, since in causes), default=-math.inf)
        seen = last + self.walk.machine.wait if target > 0 else last
        self.now = max(begin + self.walk.machine.step, seen)
        self._note(step, begin, self.now, causes=causes if target > 0 else ())
        return None

    def _branch_if_flagged(self, step: Step) -> int | None:
        awaited = self._wait_all(step)
        if awaited is None and self._round in self._host.flagged:
            self._writable = 0
            self._pc += step.skip
        return awaited

    def _enter(self, step: Step) -> None:
        self._busy(step)
        if step.flag:
            self._host.flagged.add(self._round)

    def _expose(self, step: Step) -> None:
        self._busy(step)
        access = self.walk.machine.access
        readable = 0 < step.access <= access
        if step.flag and not readable:
            self._host.flagged.add(self._round)
        self._writable = step.writable if readable and access == WRITES else 0

    def _recall(self, step: Step) -> None:
        self._busy(step)
        self._writable = 0

    def _jump(self, step: Step) -> None:
        self._pc += step.skip

    def _end_round(self, step: Step) -> None:
        self._busy(step)
        if step.free_at:
            self._free_at[self._round & 1] = self._seq + step.free_at
        self._seq += step.tick
        self._round += 1
        self._loop(step)

    def _loop(self, step: Step) -> None:
        self._segment += 1
        if self._segment < step.repeat:
            self._pc -= step.back + 1
        else:
            self._segment = 0

    def _flow(self, step: Step) -> int | None:
        rows = self.program.steps[self._pc + 1 : self._pc + 1 + step.rows]
        if self._gone is None:
            self._gone = self._send(rows)
        takes = [row for row in rows if row.kind is StepKind.TAKE]
        for row in takes:
            if row.peer in self.walk.walkers and self._arrival(row, row.peer, self.rank) is None:
                return row.peer
        given = {row.peer for row in rows if row.kind is not StepKind.TAKE}
        for row in takes:
            self._take(row, mutual=row.peer in given)
        more = max(0, len(takes) - 1) * self.walk.machine.send
        self.now = max([self.now, self._gone, *self._arrived]) + more
        self._gone, self._arrived = None, []
        self._pc += step.rows
        return None

    def _send(self, rows: Sequence[Step]) -> float:
        """Send a flow's bytes through the network; return when those not pushed have left."""
        gives = [row for row in rows if row.kind is not StepKind.TAKE]
        new = [row for row in gives if row.peer not in self._pushed]
        sizes = [self._length(row) for row in new]
        begin = max(self.now, self._host.network)
        machine = self.walk.machine
        both_ways = len(gives) < len(rows)
        through = begin + self._through(sizes, both_ways=both_ways)
        if machine.shared:
            beside = sum(sizes) * at_reach(machine.shared, self._far(sizes))
            self.walk.shared = max(begin, self.walk.shared) + beside
            through = max(through, self.walk.shared)
        gone = through + len(new) * machine.send
        for row, nbytes in zip(new, sizes, strict=True):
            self.walk.flights.setdefault((self.rank, row.peer), []).append((nbytes, begin, gone))
            self._pushed[row.peer] = gone
            self._note(row, begin, gone, nbytes)
        if new:
            self._host.network = through
            self.walk.woken(self.rank)
        # Pushed bytes leave without the rank, until a later GIVE waits for them.
        given = [self._pushed.pop(row.peer) for row in gives if row.kind is StepKind.GIVE]
        return max(given, default=self.now)

    def _through(self, sizes: Sequence[int], *, both_ways: bool) -> float:
        """Return the seconds of bytes to some ranks in a host's network."""
        return self.walk.machine.sent(sum(sizes), self._far(sizes), both_ways=both_ways)

    def _far(self, sizes: Sequence[int]) -> float:
        """Return the reach of bytes that are sent to some ranks."""
        # As measured by wire_rates.py: the bytes to all ranks, and those to a rank once more.
        return max(self.walk.arrays, sum(sizes) + max(sizes, default=0))

    def _take(self, row: Step, *, mutual: bool) -> None:
        begin, arrival = self.now, self._arrival(row, row.peer, self.rank)
        if arrival is None and mutual:  # a rank that is left out sends as this rank does
            arrival = self._arrival(row, self.rank, row.peer)
        if arrival is None:
            gone = self._gone or begin
            slow = begin + self._through([self._length(row)], both_ways=True)
            arrival = begin, max(gone, slow) + self.walk.machine.hop
        self._taken[row.peer] = self._taken.get(row.peer, 0) + self._length(row)
        self._arrived.append(arrival[1])
        causes = [(row.peer, arrival[0])]
        self._note(row, begin, max(begin, arrival[1]), self._length(row), causes)

    def _arrival(self, row: Step, src: int, dst: int) -> tuple[float, float] | None:
        """Return when bytes from `src` to `dst` begin to leave, and when a row's have arrived."""
        left = self._taken.get(row.peer, 0) + self._length(row)
        for nbytes, begin, gone in self.walk.flights.get((src, dst), ()):
            if left <= nbytes:
                share = left / nbytes if nbytes else 1.0
                return begin, begin + share * (gone - begin) + self.walk.machine.hop
            left -= nbytes
        return None


_DO: dict[StepKind, Callable[[Walker, Step], int | None]] = {
    StepKind.SIGNAL: Walker._signal,
    StepKind.WAIT: Walker._wait,
    StepKind.WAIT_ALL: Walker._wait_all,
    StepKind.MEET_ALL: Walker._wait_all,
    StepKind.FREE: Walker._free,
    StepKind.BRANCH_IF_FLAGGED: Walker._branch_if_flagged,
    StepKind.ENTER: Walker._enter,
    StepKind.EXPOSE: Walker._expose,
    StepKind.WITHDRAW: Walker._recall,
    StepKind.JUMP: Walker._jump,
    StepKind.ROUND: Walker._end_round,
    StepKind.LOOP: Walker._loop,
    StepKind.FLOW: Walker._flow,
}
