"""The simulator of a group that spans hosts: a simulated memory per host, and pipes between ranks.

A pipe between two ranks of different hosts holds a limited number of bytes. A program that relies
on more room than a socket has deadlocks here. Memory inside a host is watched for races. A barrier
between two hosts orders no accesses inside either of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import numpy as np

from nc10d.backend.cpu.algorithms.group_shape import Topology
from nc10d.backend.cpu.program.linker import scratch_bytes
from nc10d.backend.cpu.program.program import At, Program, Space, Step, StepKind
from simulation.race_simulator.simulator import (
    HANDLERS,
    Handler,
    SimulatedRank,
    SimulatedWorld,
    run_all,
)
from simulation.race_simulator.vector_clocks import Bytes, Disagreement, paired


class Pipes:
    """The bytes in flight between ranks of different hosts; each pipe holds `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.changes = 0
        self.moved: dict[tuple[int, int], int] = {}
        self._bytes: dict[tuple[int, int], bytearray] = {}

    def push(self, src: int, dst: int, data: Bytes) -> int:
        """Write as many bytes as there is room for; return their number."""
        pipe = self._bytes.setdefault((src, dst), bytearray())
        count = min(self.room - len(pipe), data.size)
        pipe += data[:count].tobytes()
        self.changes += count > 0
        self.moved[src, dst] = self.moved.get((src, dst), 0) + count
        return count

    def pull(self, src: int, dst: int, data: Bytes) -> int:
        """Read as many bytes as are there and fit into `data`; return their number."""
        pipe = self._bytes.setdefault((src, dst), bytearray())
        count = min(len(pipe), data.size)
        data[:count] = np.frombuffer(bytes(pipe[:count]), np.uint8)
        del pipe[:count]
        self.changes += count > 0
        return count

    def empty(self) -> bool:
        """Return whether all bytes sent have been received."""
        return not any(self._bytes.values())


class FarRank(SimulatedRank):
    """A rank with scratch memory, and pipes to ranks of other hosts."""

    def __init__(self, world: HostWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.number = world.numbers[rank]
        self.pipes = world.pipes
        self.scratch: Bytes = np.zeros(0, np.uint8)
        self.rooms: dict[int, int] = {}
        self.calls_begun = 0
        self.progress: dict[tuple[StepKind, int], int] = {}

    def handlers(self) -> Mapping[StepKind, Handler]:
        """Return the function that runs each kind of step."""
        return FAR_HANDLERS

    def place(self, step: Step, *, dst: bool = False) -> Bytes:
        """Return the bytes of a transfer in this segment."""
        nbytes = self.length(step)
        return self.view(step.dst if dst else step.src, nbytes, write=dst)

    def view(self, at: At, nbytes: int, *, write: bool, rank: int | None = None) -> Bytes:
        """Return an operand's bytes; scratch memory is private, so it is not watched."""
        if at.space is not Space.SCRATCH:
            return super().view(at, nbytes, write=write, rank=rank)
        low = at.offset + self.segment * at.stride
        assert nbytes == 0 or low + nbytes <= self.rooms[id(self.queue[0][0])], (at, low, nbytes)
        return self.scratch[low : low + nbytes]


class HostWorld(SimulatedWorld):
    """The ranks of one host of a cluster."""

    def __init__(
        self, numbers: Sequence[int], slot: int, pipes: Pipes, unreadable: Collection[int] = ()
    ) -> None:
        self.numbers = numbers
        self.pipes = pipes
        closed = [peer for peer, rank in enumerate(numbers) if rank in unreadable]
        super().__init__(len(numbers), slot, closed)

    def make_rank(self, rank: int) -> SimulatedRank:
        """Return a rank's state."""
        return FarRank(self, rank)

    def signalled(self) -> None:
        """Record a change that other ranks may wait for."""
        self.pipes.changes += 1


class Cluster:
    """All ranks of a group across hosts; peers cannot read arrays of the `unreadable` ranks."""

    def __init__(
        self, hosts: Topology, slot: int, room: int = 1000, unreadable: Collection[int] = ()
    ) -> None:
        self.pipes = Pipes(room)
        self._worlds = [HostWorld(ranks, slot, self.pipes, unreadable) for ranks in hosts.hosts]
        by_number: dict[int, SimulatedRank] = {}
        for world in self._worlds:
            by_number.update(zip(world.numbers, world.ranks, strict=True))
        self.ranks = [by_number[rank] for rank in range(hosts.size)]

    def submit(self, rank: int, program: Program, users: Sequence[Bytes]) -> None:
        """Queue a program on a rank; `users` are its arrays as bytes."""
        me = cast(FarRank, self.ranks[rank])
        me.queue.append((program, users))
        need = me.rooms[id(program)] = scratch_bytes(program)
        if need > me.scratch.size:
            me.scratch = np.full(need, 0xAA, np.uint8)

    def run(self, choose: Callable[[int], int] | None = None) -> None:
        """Run all programs; `choose(n)` picks which of n ranks continues (default: in turn)."""
        run_all(self.ranks, lambda: self.pipes.changes, choose)
        assert self.pipes.empty(), "bytes that no rank has received"


def _flow(rank: SimulatedRank, step: Step) -> bool:
    me = cast(FarRank, rank)
    rows = me.queue[0][0].steps[me.pc + 1 : me.pc + 1 + step.rows]
    done = [_row(me, row) for row in rows]  # Every transfer proceeds, even if another waits.
    if not all(done):
        return False
    for row in rows:
        if row.kind is not StepKind.PUSH:
            me.progress.pop(_way(row))
    me.pc += step.rows
    return True


def _row(me: FarRank, row: Step) -> bool:
    taking, key = row.kind is StepKind.TAKE, _way(row)
    done = me.progress.setdefault(key, 0)
    if done == me.length(row):
        return True
    data = me.place(row, dst=taking)
    if taking:
        done += me.pipes.pull(row.peer, me.number, data[done:])
    else:
        done += me.pipes.push(me.number, row.peer, data[done:])
    me.progress[key] = done
    return done == data.size or row.kind is StepKind.PUSH


def _way(row: Step) -> tuple[StepKind, int]:
    """Return the key of a transfer's progress: its direction, and the rank at the other end."""
    return (StepKind.TAKE if row.kind is StepKind.TAKE else StepKind.GIVE), row.peer


def _enter(rank: SimulatedRank, step: Step) -> bool:
    cast(FarRank, rank).calls_begun += 1
    return HANDLERS[step.kind](rank, step)


def _header(me: FarRank) -> Bytes:
    words = [me.calls_begun, me.queue[0][0].call.fingerprint()]
    return np.array(words, np.int64).view(np.uint8)


def _show(rank: SimulatedRank, step: Step) -> bool:
    me = cast(FarRank, rank)
    me.view(step.dst, 16, write=True)[:] = _header(me)
    return True


def _check(rank: SimulatedRank, step: Step) -> bool:
    me = cast(FarRank, rank)
    if not np.array_equal(me.view(step.src, 16, write=False), _header(me)):
        raise Disagreement(f"rank {me.number} and rank {step.peer}")
    return True


def _expect(me: SimulatedRank, step: Step) -> bool:
    theirs, mine = (
        me.view(at, step.nbytes, write=False).view(np.int64) for at in (step.src, step.own)
    )
    if not np.array_equal(theirs, mine[::-1]):  # what is sent to me is what I await, and vice versa
        raise Disagreement(f"rank {step.peer} announces another size than expected")
    return True


def _pair(me: SimulatedRank, step: Step) -> bool:
    assert step.kernel is not None
    nbytes = me.length(step)
    a = me.view(step.src, nbytes, write=False).copy().view(step.kernel.dtype.numpy)
    b = me.view(step.own, nbytes, write=False).copy().view(step.kernel.dtype.numpy)
    result = np.asarray(paired(step.kernel, a, b))
    me.view(step.dst, nbytes, write=True)[:] = result.view(np.uint8)
    return True


def _loop(me: SimulatedRank, step: Step) -> bool:
    me.segment += 1
    if me.segment < step.repeat:
        me.pc -= step.back + 1
    else:
        me.segment = 0
    return True


FAR_HANDLERS: dict[StepKind, Handler] = {
    **HANDLERS,
    StepKind.ENTER: _enter,
    StepKind.FLOW: _flow,
    StepKind.CALL_HEADER: _show,
    StepKind.CHECK_HEADER: _check,
    StepKind.CHECK_SIZES: _expect,
    StepKind.PAIR: _pair,
    StepKind.LOOP: _loop,
}
