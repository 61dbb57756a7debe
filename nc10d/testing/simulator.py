"""Runs every rank's program in one Python process, in any interleaving, and watches for races.

Steps mean here what they mean to the engine, but memory is NumPy arrays and each access to a
board is checked against the others by vector clocks: two accesses to the same bytes, one of them
a write, must be ordered by signals and waits, whatever the interleaving happened to be. A missing
wait is therefore an error even in a run that came out right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.program import INLINE_BYTES, At, Kernel, Kind, Program, Space, Step

Bytes = npt.NDArray[np.uint8]
Clock = list[int]
Handler = Callable[["Rank", Step], bool]


class Race(AssertionError):
    """Two ranks touch the same bytes and nothing orders them."""


class Deadlock(AssertionError):
    """Ranks wait and nobody can go on."""


class Disagreement(AssertionError):
    """Ranks run different calls, or exchange sizes that differ."""


PAIR: dict[str, Callable[..., object]] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@dataclass(slots=True)
class Access:
    """Who touched bytes [low, high) of a region, and when by its own clock."""

    low: int
    high: int
    rank: int
    time: int
    write: bool


@dataclass(slots=True)
class Region:
    """Bytes that all ranks can reach, with the accesses that may still conflict."""

    name: str
    data: Bytes
    accesses: list[Access] = field(default_factory=list)

    def touch(self, low: int, high: int, rank: int, clock: Clock, *, write: bool) -> None:
        """Record an access; raise Race when an earlier one is not ordered before it."""
        assert 0 <= low <= high <= self.data.size, (self.name, low, high)
        kept = []
        for old in self.accesses:
            meets = old.low < high and low < old.high
            if meets and old.rank != rank and (write or old.write) and old.time > clock[old.rank]:
                raise Race(f"{self.name}[{low}:{high}] by rank {rank} against {old}")
            # What this write covers and follows needs no further watching: whoever races with
            # the old access races with this one too.
            if not (write and low <= old.low and old.high <= high):
                kept.append(old)
        kept.append(Access(low, high, rank, clock[rank], write))
        self.accesses = kept


class Rank:
    """One rank's machine: the same state as the engine's channel, one program after another."""

    def __init__(self, world: World, rank: int) -> None:
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
        self.boards = [Region(f"board {rank}/{h}", np.zeros(world.half, np.uint8)) for h in (0, 1)]
        self.inlines = [
            Region(f"inline {rank}/{h}", np.zeros(INLINE_BYTES, np.uint8)) for h in (0, 1)
        ]
        self.marks = [Region(f"fingerprint {rank}/{h}", np.zeros(1, np.uint8)) for h in (0, 1)]
        self.calls: list[int] = [0, 0]
        self.queue: list[tuple[Program, Sequence[Bytes]]] = []
        self.pc = 0
        self.segment = 0

    def handlers(self) -> Mapping[Kind, Handler]:
        """Return what each kind of step means."""
        return HANDLERS

    def idle(self) -> bool:
        """Say whether nothing is left to do."""
        return not self.queue

    def step(self) -> bool:
        """Carry out one step; False when it has to wait."""
        program, _ = self.queue[0]
        if self.pc == len(program.steps):
            self.queue.pop(0)
            self.pc = 0
            return True
        step = program.steps[self.pc]
        if not self.handlers()[step.kind](self, step):
            return False
        self.pc += 1
        return True

    def region(self, at: At, rank: int | None = None) -> Region | None:
        """Return the shared region of an operand (of another rank's, if given), or None."""
        if at.space not in (Space.BOARD, Space.INLINE):
            return None
        owner = self.world.ranks[at.index if rank is None else rank]
        halves = owner.boards if at.space is Space.BOARD else owner.inlines
        return halves[self.round & 1]

    def view(self, at: At, nbytes: int, *, write: bool, rank: int | None = None) -> Bytes:
        """Return an operand's bytes, recording the access if they are shared."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        low = at.offset + self.segment * at.stride
        region = self.region(at, rank)
        if region is None:
            _, users = self.queue[0]
            assert low + nbytes <= users[at.index].size, (at, low, nbytes)
            return users[at.index][low : low + nbytes]
        region.touch(low, low + nbytes, self.rank, self.clock, write=write)
        return region.data[low : low + nbytes]

    def length(self, step: Step) -> int:
        """Return the bytes of this segment: all, or what is left of the total."""
        if not step.total:
            return step.nbytes
        return max(0, min(step.nbytes, step.total - self.segment * step.nbytes))

    def reached(self, peer: int, target: int) -> bool:
        """Say whether a peer's counter has come to `target`; if so, learn what it knew then."""
        other = self.world.ranks[peer]
        if other.counter < target:
            return False
        # The first signal that suffices is all that a wait guarantees.
        clock = next(clock for value, clock in other.releases if value >= target)
        self.clock = [max(a, b) for a, b in zip(self.clock, clock, strict=True)]
        return True

    def everyone_reached(self, target: int) -> bool:
        """Say whether all peers' counters have come to `target`."""
        others = [r for r in range(self.world.size) if r != self.rank]
        if self.met < target:
            if any(self.world.ranks[r].counter < target for r in others):
                return False
            for r in others:
                self.reached(r, target)
            self.met = target
        return True


def _copy(me: Rank, step: Step) -> bool:
    nbytes = me.length(step)
    me.view(step.dst, nbytes, write=True)[:] = me.view(step.src, nbytes, write=False)
    return True


def _map(me: Rank, step: Step) -> bool:
    assert step.kernel is not None
    nbytes = me.length(step)
    src = me.view(step.src, nbytes, write=False)
    me.view(step.dst, nbytes, write=True)[:] = _mapped(step.kernel, src, step.arg)
    return True


def _mapped(kernel: Kernel, data: Bytes, arg: float) -> Bytes:
    values = data.copy().view(kernel.dtype)
    if kernel.kind == "SCALE":
        return np.asarray(values * values.dtype.type(arg)).view(np.uint8)
    assert kernel.kind == "DIVIDE", kernel
    exact = np.trunc(values / arg).astype(values.dtype)
    result = exact if values.dtype.kind in "iu" else values / values.dtype.type(arg)
    return np.asarray(result, values.dtype).view(np.uint8)


def _reduce_ranks(me: Rank, step: Step) -> bool:
    assert step.kernel is not None
    nbytes = me.length(step)
    total: npt.NDArray[np.generic] | None = None
    dst = me.view(step.dst, nbytes, write=True)
    for rank in range(me.world.size):
        mine = rank == me.rank
        part = me.view(step.own if mine else step.src, nbytes, write=False, rank=rank)
        values = part.copy().view(step.kernel.dtype)
        # The engine folds pairwise into dst: a contribution that lies there is gone after the
        # first pair. Showing that here keeps builders honest.
        if total is None:
            total = values
        else:
            total = np.asarray(PAIR[step.kernel.kind](total, values))
            dst[:] = total.view(np.uint8)
    assert total is not None
    if step.last is not None:
        dst[:] = _mapped(step.last, total.view(np.uint8), step.arg)
    if step.also.space is not Space.NONE:
        me.view(step.also, nbytes, write=True)[:] = dst
    return True


def _signal(me: Rank, step: Step) -> bool:
    value = me.seq + step.tick
    assert value >= me.counter, "a counter never goes back"
    me.counter = value
    me.world.signalled()
    me.releases.append((value, list(me.clock)))
    me.clock[me.rank] += 1
    return True


def _wait(me: Rank, step: Step) -> bool:
    return me.reached(step.peer, me.seq + step.tick)


def _wait_all(me: Rank, step: Step) -> bool:
    return me.everyone_reached(me.seq + step.tick)


def _free(me: Rank, step: Step) -> bool:
    return me.everyone_reached(me.free_at[me.round & 1])


def _enter(me: Rank, step: Step) -> bool:
    del step
    half = me.round & 1
    me.marks[half].touch(0, 1, me.rank, me.clock, write=True)
    me.calls[me.round & 1] = me.queue[0][0].call.fingerprint()
    return True


def _header(me: Rank, step: Step) -> bool:
    del step
    me.marks[me.round & 1].touch(0, 1, me.rank, me.clock, write=True)
    return True


def _meet(me: Rank, step: Step) -> bool:
    if not _wait(me, step):
        return False
    _compare(me, [step.peer])
    return True


def _meet_all(me: Rank, step: Step) -> bool:
    if not _wait_all(me, step):
        return False
    _compare(me, [r for r in range(me.world.size) if r != me.rank])
    return True


def _compare(me: Rank, peers: Iterable[int]) -> None:
    half = me.round & 1
    for peer in peers:
        me.world.ranks[peer].marks[half].touch(0, 1, me.rank, me.clock, write=False)
        if me.world.ranks[peer].calls[half] != me.calls[half]:
            raise Disagreement(f"rank {me.rank} and rank {peer} at tick {me.seq}")


def _agree(me: Rank, step: Step) -> bool:
    size = me.world.size
    _, users = me.queue[0]
    largest = 0
    for rank in range(size):
        shown = me.view(At(Space.BOARD, rank), 8 * size, write=False).view(np.int64)
        expected = users[step.own.index].view(np.int64)[rank]
        if int(shown[me.rank]) != int(expected):
            raise Disagreement(f"rank {rank} sends {shown[me.rank]} bytes, awaited {expected}")
        largest = max(largest, int(shown.max()))
    me.agreed = max(1, -(-largest // int(step.arg)))
    return True


def _round(me: Rank, step: Step) -> bool:
    repeat = step.repeat if step.kind is Kind.ROUND else me.agreed
    me.free_at[me.round & 1] = me.seq + step.free
    me.seq += step.tick
    me.round += 1
    me.segment += 1
    if me.segment < repeat:
        me.pc -= step.back + 1
    else:
        me.segment = 0
    return True


HANDLERS: dict[Kind, Handler] = {
    Kind.COPY: _copy,
    Kind.MAP: _map,
    Kind.REDN: _reduce_ranks,
    Kind.SIGNAL: _signal,
    Kind.WAIT: _wait,
    Kind.WAITALL: _wait_all,
    Kind.FREE: _free,
    Kind.ENTER: _enter,
    Kind.MEET: _meet,
    Kind.MEETALL: _meet_all,
    Kind.AGREE: _agree,
    Kind.ROUND: _round,
    Kind.LOOP_AGREED: _round,
    Kind.HEADER: _header,
}


class World:
    """All ranks of one group, with boards of `half` bytes."""

    def __init__(self, size: int, half: int) -> None:
        self.size = size
        self.half = half
        self._counters = 0
        self.ranks: list[Rank] = []
        self.ranks.extend(self.make_rank(rank) for rank in range(size))

    def make_rank(self, rank: int) -> Rank:
        """Return a rank's machine."""
        return Rank(self, rank)

    def signalled(self) -> None:
        """Note that some rank's counter has changed."""
        self._counters += 1

    def submit(self, rank: int, program: Program, users: Sequence[Bytes]) -> None:
        """Queue a program on a rank; `users` are its arrays as bytes."""
        self.ranks[rank].queue.append((program, users))

    def run(self, choose: Callable[[int], int] | None = None) -> None:
        """Run everything; `choose(n)` picks which of n ranks goes on (default: in turn)."""
        run_all(self.ranks, lambda: self._counters, choose)


def run_all(
    ranks: Sequence[Rank], changes: Callable[[], int], choose: Callable[[int], int] | None
) -> None:
    """Run all ranks' programs; `changes` counts what may set somebody free."""
    ready = [rank for rank in ranks if not rank.idle()]
    stuck: list[Rank] = []
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
