"""Runs every rank's program in a single Python process, in any interleaving, and finds races.

The steps mean the same as in the engine, but memory is NumPy arrays. Vector clocks check each
access to shared memory: signals and waits must order two accesses to the same bytes if either is a
write. So a missing wait is an error even in a run whose result is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.algorithms.message import Cells
from nc10d.backend.cpu.program.program import (
    INLINE_BYTES,
    SHARED,
    At,
    Program,
    Space,
    Step,
    StepKind,
)
from nc10d.backend.cpu.program.steps import SIZES_BYTES
from simulation.race_simulator import exposed_arrays
from simulation.race_simulator.vector_clocks import (
    Bytes,
    Clock,
    Deadlock,
    Disagreement,
    Region,
    mapped,
    paired,
)

CELLS = Cells(4, 256)
"""Those of a link: few, so that a sender soon waits for a cell."""
Handler = Callable[["SimulatedRank", Step], bool]


class SimulatedRank:
    """A rank's state, which is that of the engine's channel; it runs a queue of programs."""

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.clock: Clock = [0] * world.size
        self.clock[rank] = 1
        self.counter = 0
        self.releases: list[tuple[int, Clock]] = [(0, [0] * world.size)]
        self.seq = 0
        self.round = 0
        self.free_at = [0, 0]
        self.met = 0
        self.agreed = 1
        self.staging = [
            Region(f"staging {rank}/{h}", np.zeros(world.slot, np.uint8)) for h in (0, 1)
        ]
        self.inlines = [
            Region(f"inline {rank}/{h}", np.zeros(INLINE_BYTES, np.uint8)) for h in (0, 1)
        ]
        # On a link, whose sender is rank 0.
        self.cells = [
            Region(f"cell {rank}/{h}", np.zeros(world.cells.nbytes, np.uint8))
            for h in range(world.cells.count)
        ]
        self.headers = [
            Region(f"header {rank}/{h}", np.zeros(1, np.uint8)) for h in range(world.cells.count)
        ]
        self.marks = [Region(f"fingerprint {rank}/{h}", np.zeros(1, np.uint8)) for h in (0, 1)]
        self.calls: list[int] = [0, 0]
        # For each slot of the staging buffer: this rank's flag, and the arrays that it has exposed.
        self.flags = [False, False]
        self.exposed: dict[tuple[int, int], Region] = {}
        self.writable = 0
        self.written: Region | None = None
        self.queue: list[tuple[Program, Sequence[Bytes]]] = []
        self.pc = 0
        self.segment = 0

    def handlers(self) -> Mapping[StepKind, Handler]:
        """Return the function that runs each kind of step."""
        return HANDLERS

    def idle(self) -> bool:
        """Return whether the queue is empty."""
        return not self.queue

    def step(self) -> bool:
        """Run a step; return False if it has to wait."""
        program, _ = self.queue[0]
        if self.pc == len(program.steps):
            exposed_arrays.withdraw(self)
            self.queue.pop(0)
            self.pc = 0
            return True
        step = program.steps[self.pc]
        if not self.handlers()[step.kind](self, step):
            return False
        self.pc += 1
        return True

    def region(self, at: At, rank: int | None = None) -> Region | None:
        """Return an operand's shared region (of `rank`, if given), or None for a private array."""
        if at.space not in SHARED:
            return None
        owner = self.world.ranks[at.index if rank is None else rank]
        if at.space is Space.CELL:
            return owner.cells[self.round % len(owner.cells)]
        slots = owner.inlines if at.space is Space.INLINE else owner.staging
        return slots[(self.round + (at.space is Space.EARLIER)) & 1]

    def view(self, at: At, nbytes: int, *, write: bool, rank: int | None = None) -> Bytes:
        """Return an operand's bytes, recording the access if they are shared."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        low = at.offset + self.segment * at.stride
        region = self.region(at, rank)
        if region is None:
            _, users = self.queue[0]
            assert low + nbytes <= users[at.index].size, (at, low, nbytes)
            exposed_arrays.touch(self, users[at.index], low, nbytes, write=write)
            return users[at.index][low : low + nbytes]
        region.touch(low, low + nbytes, self.rank, self.clock, write=write)
        return region.data[low : low + nbytes]

    def length(self, step: Step) -> int:
        """Return the bytes of this segment: all, or the rest of the total."""
        if not step.total:
            return step.nbytes
        return max(0, min(step.nbytes, step.total - self.segment * step.nbytes))

    def reached(self, peer: int, target: int) -> bool:
        """Return whether a peer's counter has reached `target`; if so, merge its clock."""
        other = self.world.ranks[peer]
        if other.counter < target:
            return False
        # A wait guarantees no more than the first signal that reaches the target.
        clock = next(clock for value, clock in other.releases if value >= target)
        self.clock = [max(a, b) for a, b in zip(self.clock, clock, strict=True)]
        return True

    def everyone_reached(self, target: int) -> bool:
        """Return whether all peers' counters have reached `target`."""
        if self.met < target:
            if any(self.world.ranks[r].counter < target for r in self.others):
                return False
            for r in self.others:
                self.reached(r, target)
            self.met = target
        return True

    def compare(self, peers: Iterable[int]) -> bool:
        """Compare peers' fingerprints with this rank's; return whether any rank set the flag."""
        slot = self.round & 1
        flagged = self.flags[slot]
        for peer in peers:
            other = self.world.ranks[peer]
            other.marks[slot].touch(0, 1, self.rank, self.clock, write=False)
            if other.calls[slot] != self.calls[slot]:
                raise Disagreement(f"rank {self.rank} and rank {peer} at tick {self.seq}")
            flagged = flagged or other.flags[slot]
        return flagged

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [r for r in range(self.world.size) if r != self.rank]


def _copy(me: SimulatedRank, step: Step) -> bool:
    nbytes = me.length(step)
    me.view(step.dst, nbytes, write=True)[:] = me.view(step.src, nbytes, write=False)
    return True


def _map(me: SimulatedRank, step: Step) -> bool:
    assert step.kernel is not None
    nbytes = me.length(step)
    src = me.view(step.src, nbytes, write=False)
    me.view(step.dst, nbytes, write=True)[:] = mapped(step.kernel, src, step.arg)
    return True


def _fold_staged(me: SimulatedRank, step: Step) -> bool:
    assert step.kernel is not None
    nbytes = me.length(step)
    total: npt.NDArray[np.generic] | None = None
    dst = me.view(step.dst, nbytes, write=True)
    for rank in range(me.world.size):
        mine = rank == me.rank
        part = me.view(step.own if mine else step.src, nbytes, write=False, rank=rank)
        values = part.copy().view(step.kernel.dtype.numpy)
        # The engine reduces pairwise into dst, which overwrites a contribution there after the
        # first pair, unless dst is in a staging buffer. An algorithm must not rely on it.
        if total is None:
            total = values
        else:
            total = np.asarray(paired(step.kernel, total, values))
            dst[:] = total.view(np.uint8)
    assert total is not None
    if step.last is not None:
        dst[:] = mapped(step.last, total.view(np.uint8), step.arg)
    if step.also.space is not Space.NONE:
        me.view(step.also, nbytes, write=True)[:] = dst
    return True


def _signal(me: SimulatedRank, step: Step) -> bool:
    value = me.seq + step.tick
    assert value >= me.counter, "a counter never goes back"
    me.counter = value
    me.world.signalled()
    me.releases.append((value, list(me.clock)))
    me.clock[me.rank] += 1
    return True


def _wait(me: SimulatedRank, step: Step) -> bool:
    return me.reached(step.peer, me.seq + step.tick)


def _wait_all(me: SimulatedRank, step: Step) -> bool:
    return me.everyone_reached(me.seq + step.tick)


def _free(me: SimulatedRank, step: Step) -> bool:
    return me.everyone_reached(me.free_at[me.round & 1])


def _enter(me: SimulatedRank, step: Step) -> bool:
    slot = me.round & 1
    me.marks[slot].touch(0, 1, me.rank, me.clock, write=True)
    me.calls[slot] = me.queue[0][0].call.fingerprint() ^ me.seq
    me.flags[slot] = step.flag
    return True


def _header(me: SimulatedRank, step: Step) -> bool:
    del step
    me.headers[me.round % len(me.headers)].touch(0, 1, me.rank, me.clock, write=True)
    return True


def _meet_all(me: SimulatedRank, step: Step) -> bool:
    if not _wait_all(me, step):
        return False
    me.compare(me.others)
    return True


def _agree(me: SimulatedRank, step: Step) -> bool:
    size = me.world.size
    places = [At(Space.STAGING, rank, step.src.offset) for rank in range(size)]
    views = [me.view(at, SIZES_BYTES * size, write=False).view(np.int64) for at in places]
    sent, awaited = np.stack([view.reshape(size, 2) for view in views]).transpose(2, 0, 1)
    if not np.array_equal(sent, awaited.T):
        raise Disagreement(f"sizes: {sent.tolist()} sent, {awaited.T.tolist()} awaited")
    me.agreed = max(1, -(-int(sent.max()) // step.piece))
    return True


def _round(me: SimulatedRank, step: Step) -> bool:
    repeat = step.repeat if step.kind is StepKind.ROUND else me.agreed
    me.free_at[me.round & 1] = me.seq + step.free_at
    me.seq += step.tick
    me.round += 1
    me.segment += 1
    if me.segment < repeat:
        me.pc -= step.back + 1
    else:
        me.segment = 0
    return True


HANDLERS: dict[StepKind, Handler] = {
    StepKind.COPY: _copy,
    StepKind.APPLY: _map,
    StepKind.FOLD_STAGED: _fold_staged,
    StepKind.SIGNAL: _signal,
    StepKind.WAIT: _wait,
    StepKind.WAIT_ALL: _wait_all,
    StepKind.FREE: _free,
    StepKind.ENTER: _enter,
    StepKind.MEET_ALL: _meet_all,
    StepKind.AGREE: _agree,
    StepKind.ROUND: _round,
    StepKind.LOOP_AGREED: _round,
    StepKind.WRITE_HEADER: _header,
    **exposed_arrays.HANDLERS,
}


class SimulatedWorld:
    """All ranks of a group on a single host, with staging buffers of two slots of `slot` bytes.

    No peer can read the arrays of the `unreadable` ranks. Ranks in `keeping` expose their arrays
    for reading only. A world of two ranks may be a link, with cells as in CELLS.
    """

    def __init__(
        self, size: int, slot: int, unreadable: Iterable[int] = (), keeping: Iterable[int] = ()
    ) -> None:
        self.size = size
        self.unreadable = frozenset(unreadable)
        self.keeping = frozenset(keeping)
        self.slot = slot
        self.cells = CELLS
        self._counters = 0
        self.ranks: list[SimulatedRank] = []
        self.ranks.extend(self.make_rank(rank) for rank in range(size))

    def make_rank(self, rank: int) -> SimulatedRank:
        """Return a rank's state."""
        return SimulatedRank(self, rank)

    def signalled(self) -> None:
        """Record that a rank's counter has changed."""
        self._counters += 1

    def submit(self, rank: int, program: Program, users: Sequence[Bytes]) -> None:
        """Queue a program on a rank; `users` are its arrays as bytes."""
        self.ranks[rank].queue.append((program, users))

    def run(self, choose: Callable[[int], int] | None = None) -> None:
        """Run all programs; `choose(n)` picks which of n ranks continues (default: in turn)."""
        run_all(self.ranks, lambda: self._counters, choose)


def run_all(
    ranks: Sequence[SimulatedRank], changes: Callable[[], int], choose: Callable[[int], int] | None
) -> None:
    """Run all ranks' programs; `changes` counts events that may end a rank's wait."""
    ready = [rank for rank in ranks if not rank.idle()]
    stuck: list[SimulatedRank] = []
    turn = 0
    while ready:
        index = choose(len(ready)) if choose else turn % len(ready)
        turn += 1
        rank, before = ready[index], changes()
        burst = 1 + choose(8) if choose else 1
        while burst and not rank.idle() and rank.step():
            burst -= 1
        if rank.idle() or burst:
            ready[index] = ready[-1]
            ready.pop()
            if not rank.idle():
                stuck.append(rank)
        if changes() != before:
            ready += stuck
            stuck.clear()
    if stuck:
        raise Deadlock([(rank.rank, rank.pc, rank.seq) for rank in stuck])
