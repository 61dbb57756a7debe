"""Measures the cost of bytes inside a host, as constants of the cost model.

Two ranks run programs at the same time, as in a collective: a rank writes to the part of its
staging buffer that its peer has just read, and reads bytes that its peer has just written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.model.measurements import Sample, typical
from benchmarks.model.program_timer import MANY, Bytes, ProgramTimer, often, repeated
from nc10d.backend.cpu.algorithms.group_shape import DIRECT
from nc10d.backend.cpu.native import offsets as codes
from nc10d.backend.cpu.program.program import LINE, Combine, Kernel, Step, line_down, staging, user
from nc10d.backend.cpu.program.steps import (
    copy,
    end_round,
    expose,
    fetch,
    fill_exposed,
    fold_exposed,
    fold_staged,
    free,
    pair,
    signal,
    wait_all,
    withdraw,
)

BY_KERNEL = DIRECT // 2
"""The least reach at which the kernel's copies are timed: half a broadcast is so long."""
HUGE = 4 << 20
"""The least reach at which arrays of two ranks may fill a last cache."""
STEPS = 64
FEW = 3
"""Segments of a program: other programs seldom leave a long program undisturbed."""
COMBINE = Combine(Kernel("SUM", "float32"))
MEET = [signal(1), wait_all(1)]
LAST = [signal(2), wait_all(2), withdraw(), end_round(2, 2)]
Way = tuple[Sequence[Step], Sequence[Step]]
"""A rank's steps before the rendezvous, and after it."""


def handshakes(timer: ProgramTimer) -> Sample:
    """Time a signal and its wait, amid many, and a step."""
    x = np.zeros(64, np.uint8)
    empty = repeated(lambda: timer.run([], x), 100)
    steps = repeated(lambda: timer.run([copy(user(0), user(1), 0)] * STEPS, x), 20)
    few, many = (rounds([], [], count) for count in (MANY, 3 * MANY))
    short = repeated(lambda: timer.run(few, x), 50)
    waits = repeated(lambda: timer.run(many, x), 50) - short
    return {("step", 0): (steps - empty) / STEPS, ("wait", 0): waits / (2 * MANY)}


def rounds(
    show: Sequence[Step], read: Sequence[Step], count: int, *, single: bool = False
) -> list[Step]:
    """Return a program of `count` rounds: publish, wait for the peer, read from the peer.

    With `single`, no rank begins the next round before all have read, as where a call is a single
    round. After the last round all ranks synchronize again, so that they leave together.
    """
    body = [*show, signal(1), wait_all(1), *read]
    if single:
        body += [signal(2), wait_all(2)]
    ticks = 2 if single else 1
    last = [signal(1), wait_all(1), end_round(1, 0)]
    return [free(), *body, end_round(ticks, ticks + 1, count, len(body)), *last]


def moves(timer: ProgramTimer, reach: int) -> Sample:
    """Time bytes put, got, folded and copied, by ranks whose arrays have `reach` bytes.

    Each figure is the difference of two programs that differ in a step. Both begin by putting and
    end by reading, so that caches are as in a collective. Three arrays take part. Near the size of
    the last cache, bytes that are got or folded in place use two arrays, as in an all_reduce. There
    a single program gets and copies all bytes into an array that is never read: as in an
    all_gather, the copies of a large array bypass the cache then.
    """
    thirds = differences(timer, reach // 3, ("get", "put", "copy", "fold", "third", "also", "pair"))
    halves = differences(timer, reach // 2, ("get", "fold")) if reach >= HUGE else thirds
    put = min(max(thirds["put"] - thirds["get"], 0.0), thirds["get"], halves["get"], halves["fold"])
    unread, copied = halves["get"], thirds["copy"] - thirds["get"]
    if reach >= HUGE:
        unread = differences(timer, reach // 2, ("get",), None)["get"]
        copied = differences(timer, reach // 3, ("copy",), None)["copy"] - unread
    return {
        ("put", reach): put,
        ("get", reach): halves["get"] - put,
        ("unread", reach): unread - put,
        ("rooted", reach): rooted(timer, reach, put),
        ("fold", reach): halves["fold"] - put,
        ("third", reach): thirds["third"] - put,
        ("copy", reach): copied,
        ("also", reach): thirds["also"] - thirds["fold"],
        ("pair", reach): thirds["pair"] - thirds["get"],
    }


def differences(
    timer: ProgramTimer, part: int, names: Sequence[str], most: int | None = FEW
) -> dict[str, float]:
    """Time programs that differ in a step, on arrays of `part` bytes; return seconds a byte.

    Half a slot is read at a time: between a third, as by an all_reduce, and the whole, as by a
    broadcast. Lines that their owner has just written arrive more slowly than lines that have left
    the owner's cache. `most` is that of Passes.of.
    """
    part = line_down(part)
    room = line_down(timer.backend.shape.slot_bytes // 2)
    through = Passes.of(part, room, most)
    segment, stride = through.segment, through.stride
    x, y = np.ones(part, np.uint8), np.ones(2 * part, np.uint8)
    own, peers = staging(timer.rank), staging(timer.others[0])
    first, second, target = user(0, 0, stride), user(1, 0, stride), user(1, part, stride)
    put, get = copy(own, first, segment), copy(target, peers, segment)
    folded = partial(fold_staged, target, staging(0), nbytes=segment, how=COMBINE)
    ways: dict[str, Way] = {
        "get": ([put], [get]),
        "put": ([put, copy(own, second, segment)], [get]),
        "copy": ([put], [get, copy(second, first, segment)]),
        "fold": ([put], [folded(own=target)]),
        "third": ([put], [folded(own=second)]),
        "also": ([put], [folded(own=target, also=staging(timer.rank, room))]),
        "pair": ([put], [get, pair(second, first, target, segment, COMBINE.pair)]),
    }
    return seconds_a_byte(timer, through, {name: [ways[name]] for name in names}, x, y)


def rooted(timer: ProgramTimer, reach: int, put: float) -> float:
    """Time a byte that a rank puts and the other gets, as in a broadcast, with changing roots.

    Where cores share no cache, lines that go in a single direction arrive more quickly. Bytes that
    fit in a slot are got after they have been put, at the rate `put`. Of more bytes a slot is got
    while the next is put, all by a single program: a large array bypasses the cache then.
    """
    part = line_down(reach)
    through = Passes.of(part, timer.backend.shape.slot_bytes)
    x, place = np.ones(part, np.uint8), user(0, 0, through.stride)
    root_way: Way = [copy(staging(timer.rank), place, through.segment)], []
    peer_way: Way = [], [copy(place, staging(timer.others[0]), through.segment)]
    turns = [root_way, peer_way]
    if timer.rank > timer.others[0]:
        turns.reverse()
    alone = (
        1 if through.single else through.count
    )  # of so many puts the peer waits for the first only
    taken = seconds_a_byte(timer, through, {"rooted": turns}, x, x, single=through.single)["rooted"]
    return taken - put / alone


@dataclass(frozen=True, slots=True)
class Passes:
    """The segments of programs over arrays: `count` from each of `starts`, `stride` apart."""

    segment: int
    stride: int
    count: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, part: int, room: int, most: int | None = None) -> Passes:
        """Cut `part` bytes into segments of `room`, at most `most` a program; None is no limit.

        Up to `room` bytes are a single segment, which a program repeats MANY times. The last
        program begins earlier where it would exceed the array; its first bytes are then used twice.
        """
        if part <= room:
            return cls(part, 0, MANY, (0,))
        count = part // room if most is None else min(most, part // room)
        window = room * count
        starts = [*range(0, part - window + 1, window)]
        rest = [part - window] if starts[-1] + window < part else []
        return cls(room, room, count, (*starts, *rest))

    @property
    def single(self) -> bool:
        """Whether all bytes of a call fit in a slot."""
        return self.stride == 0


def seconds_a_byte(
    timer: ProgramTimer,
    through: Passes,
    ways: Mapping[str, Sequence[Way]],
    x: Bytes,
    y: Bytes,
    *,
    single: bool = False,
) -> dict[str, float]:
    """Time bytes that are shown and read in rounds over two arrays, without the rendezvous.

    The ways of a name run in sequence, and their times and bytes are added. All segments of the
    arrays count: near the size of a cache, some are quicker. `single` is that of rounds.
    """
    turns = len(next(iter(ways.values())))
    named = {**ways, "meet": [((), ())] * turns}
    make = partial(rounds, count=through.count, single=single)
    programs = {name: [make(*way) for way in found] for name, found in named.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(often(max(x.nbytes, through.segment * through.count))):
        for name, steps in programs.items():
            runs = [timer.run(way, x[at:], y[at:]) for way in steps for at in through.starts]
            times[name].append(sum(runs))
    found = {name: typical(taken) for name, taken in times.items()}
    nbytes = turns * len(through.starts) * through.count * through.segment
    return {name: (found[name] - found["meet"]) / nbytes for name in ways}


def fetches(timer: ProgramTimer, reach: int) -> Sample:
    """Time the kernel's copies from the peer's array, just written; both have `reach` bytes."""
    half = reach // 2
    x, y = np.ones(half, np.uint8), np.ones(half, np.uint8)
    shown = [copy(user(0), user(1), half), free(), expose(timer.rank, user(0), codes.READS)]
    fetched = fetch(user(1), timer.others[0], 0, half)
    return {("kernel", reach): per_byte(timer, shown, fetched, x, y)}


def fills(timer: ProgramTimer, reach: int) -> Sample:
    """Time the kernel's copies of bytes just written into the peer's exposed array."""
    part = reach // 3
    x, y = np.ones(part, np.uint8), np.ones(2 * part, np.uint8)
    writable = expose(timer.rank, user(1), codes.WRITES, flag=False, writable=part)
    shown = [copy(user(0), user(1, part), part), free(), writable]
    return {("fill", reach): per_byte(timer, shown, fill_exposed(user(0), part), x, y)}


def folds(timer: ProgramTimer, reach: int) -> Sample:
    """Time folds of the peer's exposed array: bytes are fetched, folded and written back."""
    half = reach // 2
    low, place = timer.rank * half, user(0, timer.rank * half)
    x = np.ones(2 * half, np.uint8)
    shown = [free(), expose(timer.rank, user(0), codes.WRITES, writable=2 * half)]
    room, most = staging(timer.rank, LINE), line_down((timer.backend.shape.slot_bytes - LINE) // 2)
    fold = fold_exposed(place, place, low, half, COMBINE, room, most, 2 * half)
    return {("writable", reach): per_byte(timer, shown, fold, x)}


def per_byte(timer: ProgramTimer, shown: Sequence[Step], step: Step, *arrays: Bytes) -> float:
    """Return the seconds a byte of a step on arrays that peers have shown."""
    without = [*shown, *MEET, *LAST]
    whole = [*shown, *MEET, step, *LAST]
    empty = repeated(lambda: timer.run(without, *arrays), often(step.nbytes))
    taken = repeated(lambda: timer.run(whole, *arrays), often(step.nbytes))
    return (taken - empty) / step.nbytes


def rates(timer: ProgramTimer, reach: int) -> Sample:
    """Time a byte of each step that moves bytes, in arrays of `reach` bytes."""
    found, access = moves(timer, reach), timer.backend.group.memory.access()
    if reach >= BY_KERNEL:
        found |= fetches(timer, reach) if access >= codes.READS else {}
        if access >= codes.WRITES:
            found |= {**fills(timer, reach), **folds(timer, reach)}
    return found
