"""What bytes inside a host cost, as constants of the cost model: programs, and their timing.

Two ranks run them at the same time: what a rank puts on its board its mate has just read, and what
it gets its mate has just put, as in a collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.model.runner import MANY, Bench, Bytes, often, repeated
from benchmarks.model.samples import Sample, typical
from nc10d.backend.cpu.algorithms.hosts_steps import pair
from nc10d.backend.cpu.algorithms.tuning import DIRECT
from nc10d.backend.cpu.native import offsets as codes
from nc10d.backend.cpu.program.lines import LINE, line_down
from nc10d.backend.cpu.program.program import Combine, Kernel, Step, board, user
from nc10d.backend.cpu.program.steps import (
    copy,
    end_round,
    expose,
    fetch,
    fill_lent,
    fold_exposed,
    free,
    recall,
    reduce_ranks,
    signal,
    wait_all,
)

BY_KERNEL = DIRECT // 2
"""The least reach at which the kernel's copies are timed: a broadcast's halves are so long."""
HUGE = 4 << 20
"""The least reach at which arrays of two ranks may fill a last cache."""
STEPS = 64
FEW = 3
"""Segments that a program goes through: what takes long is seldom left alone by other programs."""
HOW = Combine(Kernel("SUM", "float32"))
MEET = [signal(1), wait_all(1)]
LAST = [signal(2), wait_all(2), recall(), end_round(2, 2)]
Way = tuple[Sequence[Step], Sequence[Step]]
"""What a rank does before ranks meet, and after."""


def handshakes(bench: Bench) -> Sample:
    """Time a handshake amid many, and a step."""
    x = np.zeros(64, np.uint8)
    empty = repeated(lambda: bench.run([], x), 100)
    steps = repeated(lambda: bench.run([copy(user(0), user(1), 0)] * STEPS, x), 20)
    few, many = (rounds([], [], count) for count in (MANY, 3 * MANY))
    short = repeated(lambda: bench.run(few, x), 50)
    waits = repeated(lambda: bench.run(many, x), 50) - short
    return {
        ("step", 0): (steps - empty) / STEPS,
        ("wait", 0): waits / (2 * MANY),
    }


def rounds(
    show: Sequence[Step], read: Sequence[Step], count: int, *, single: bool = False
) -> list[Step]:
    """Return a program of `count` rounds: show something, meet, read what the mate shows.

    `single`: nobody begins the next before all have read, as where a call is one round. After the
    last all meet once more, so that nobody leaves earlier than the others.
    """
    body = [*show, signal(1), wait_all(1), *read]
    if single:
        body += [signal(2), wait_all(2)]
    ticks = 2 if single else 1
    last = [signal(1), wait_all(1), end_round(1, 0)]
    return [free(), *body, end_round(ticks, ticks + 1, count, len(body)), *last]


def moves(bench: Bench, reach: int) -> Sample:
    """Time bytes put, got, folded and copied, by ranks that go through `reach` bytes.

    Each figure is the difference of two programs that differ in one step, both of which begin by
    putting and end by reading: so caches are as in a collective. Three arrays take part; where a
    last cache may end, what is got or folded in place goes through two, as in an all_reduce. There
    what is got and copied into an array that nobody reads is so by one program for all of it: as by
    that of an all_gather, a large array goes past the cache then.
    """
    thirds = differences(bench, reach // 3, ("get", "put", "copy", "fold", "third", "also", "pair"))
    halves = differences(bench, reach // 2, ("get", "fold")) if reach >= HUGE else thirds
    put = min(max(thirds["put"] - thirds["get"], 0.0), thirds["get"], halves["get"], halves["fold"])
    unread, copied = halves["get"], thirds["copy"] - thirds["get"]
    if reach >= HUGE:
        unread = differences(bench, reach // 2, ("get",), None)["get"]
        copied = differences(bench, reach // 3, ("copy",), None)["copy"] - unread
    return {
        ("put", reach): put,
        ("get", reach): halves["get"] - put,
        ("unread", reach): unread - put,
        ("rooted", reach): rooted(bench, reach, put),
        ("fold", reach): halves["fold"] - put,
        ("third", reach): thirds["third"] - put,
        ("copy", reach): copied,
        ("also", reach): thirds["also"] - thirds["fold"],
        ("pair", reach): thirds["pair"] - thirds["get"],
    }


def differences(
    bench: Bench, part: int, names: Sequence[str], most: int | None = FEW
) -> dict[str, float]:
    """Time programs that differ in a step, on arrays of `part` bytes; return each's seconds a byte.

    Half of what a board takes is read at a time, between a third, as by an all_reduce, and all of
    it, as by a broadcast: a line that its owner has just written comes slower than one that has
    left its owner's cache. `most` as for Passes.of.
    """
    part = line_down(part)
    room = line_down(bench.backend.shape.half // 2)
    through = Passes.of(part, room, most)
    segment, stride = through.segment, through.stride
    x, y = np.ones(part, np.uint8), np.ones(2 * part, np.uint8)
    mine, theirs = board(bench.rank), board(bench.others[0])
    first, second, target = user(0, 0, stride), user(1, 0, stride), user(1, part, stride)
    put, get = copy(mine, first, segment), copy(target, theirs, segment)
    folded = partial(reduce_ranks, target, board(0), nbytes=segment, how=HOW)
    ways: dict[str, Way] = {
        "get": ([put], [get]),
        "put": ([put, copy(mine, second, segment)], [get]),
        "copy": ([put], [get, copy(second, first, segment)]),
        "fold": ([put], [folded(own=target)]),
        "third": ([put], [folded(own=second)]),
        "also": ([put], [folded(own=target, also=board(bench.rank, room))]),
        "pair": ([put], [get, pair(second, first, target, segment, HOW.pair)]),
    }
    return seconds_a_byte(bench, through, {name: [ways[name]] for name in names}, x, y)


def rooted(bench: Bench, reach: int, put: float) -> float:
    """Time a byte that one rank puts and the other gets, as in a broadcast, each in turn the root.

    Where cores share no cache, lines that go only one way come quicker. What fits on a board is got
    when it has been put, at the rate `put`; of more a board is got while the next is put, all by
    one program: a large array goes past the cache then.
    """
    part = line_down(reach)
    through = Passes.of(part, bench.backend.shape.half)
    x, place = np.ones(part, np.uint8), user(0, 0, through.stride)
    root: Way = [copy(board(bench.rank), place, through.segment)], []
    mate: Way = [], [copy(place, board(bench.others[0]), through.segment)]
    turns = [root, mate] if bench.rank < bench.others[0] else [mate, root]
    alone = 1 if through.single else through.count  # of so many puts one keeps the mate waiting
    taken = seconds_a_byte(bench, through, {"rooted": turns}, x, x, single=through.single)["rooted"]
    return taken - put / alone


@dataclass(frozen=True, slots=True)
class Passes:
    """How programs go through arrays: `count` segments from each of `starts` on, `stride` apart."""

    segment: int
    stride: int
    count: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, part: int, room: int, most: int | None = None) -> Passes:
        """Cut `part` bytes into segments of `room`, at most `most` a program, all if that is None.

        What fits in `room` is one segment, which a program goes through MANY times. The last
        program begins earlier, where that is needed to end with the array: its first bytes are met
        twice.
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
        """Whether what a call moves goes on a board at once."""
        return self.stride == 0


def seconds_a_byte(
    bench: Bench,
    through: Passes,
    ways: Mapping[str, Sequence[Way]],
    x: Bytes,
    y: Bytes,
    *,
    single: bool = False,
) -> dict[str, float]:
    """Time what is shown and read in rounds, all through two arrays, in turns; less the meetings.

    A name's ways run one after another, and their times and bytes are added. All of the arrays
    count: where a cache ends, a part of them is quick. `single` as for rounds.
    """
    turns = len(next(iter(ways.values())))
    named = {**ways, "meet": [((), ())] * turns}
    make = partial(rounds, count=through.count, single=single)
    programs = {name: [make(*way) for way in found] for name, found in named.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(often(max(x.nbytes, through.segment * through.count))):
        for name, ones in programs.items():
            runs = [bench.run(one, x[at:], y[at:]) for one in ones for at in through.starts]
            times[name].append(sum(runs))
    found = {name: typical(taken) for name, taken in times.items()}
    nbytes = turns * len(through.starts) * through.count * through.segment
    return {name: (found[name] - found["meet"]) / nbytes for name in ways}


def fetches(bench: Bench, reach: int) -> Sample:
    """Time the kernel's copies from the mate's array, just written, of `reach` bytes with mine."""
    half = reach // 2
    x, y = np.ones(half, np.uint8), np.ones(half, np.uint8)
    shown = [copy(user(0), user(1), half), free(), expose(bench.rank, user(0), codes.READS)]
    fetched = fetch(user(1), bench.others[0], 0, half)
    return {("kernel", reach): per_byte(bench, shown, fetched, x, y)}


def fills(bench: Bench, reach: int) -> Sample:
    """Time the kernel's copies of what I have just written into what the mate has lent."""
    part = reach // 3
    x, y = np.ones(part, np.uint8), np.ones(2 * part, np.uint8)
    lent = expose(bench.rank, user(1), codes.WRITES, flag=False, lent=part)
    shown = [copy(user(0), user(1, part), part), free(), lent]
    return {("fill", reach): per_byte(bench, shown, fill_lent(user(0), part), x, y)}


def folds(bench: Bench, reach: int) -> Sample:
    """Time folds of what the mate has lent, again and again: fetched, folded, given back."""
    mine = reach // 2
    low, place = bench.rank * mine, user(0, bench.rank * mine)
    x = np.ones(2 * mine, np.uint8)
    shown = [free(), expose(bench.rank, user(0), codes.WRITES, lent=2 * mine)]
    room, most = board(bench.rank, LINE), line_down((bench.backend.shape.half - LINE) // 2)
    fold = fold_exposed(place, place, low, mine, HOW, room, most, 2 * mine)
    return {("lent", reach): per_byte(bench, shown, fold, x)}


def per_byte(bench: Bench, shown: Sequence[Step], step: Step, *arrays: Bytes) -> float:
    """Return the seconds a byte of a step on what mates have shown."""
    without = [*shown, *MEET, *LAST]
    whole = [*shown, *MEET, step, *LAST]
    empty = repeated(lambda: bench.run(without, *arrays), often(step.nbytes))
    taken = repeated(lambda: bench.run(whole, *arrays), often(step.nbytes))
    return (taken - empty) / step.nbytes


def rates(bench: Bench, reach: int) -> Sample:
    """Time a byte of everything that moves bytes, in arrays of `reach` bytes."""
    found, access = moves(bench, reach), bench.backend.group.memory.access()
    if reach >= BY_KERNEL:
        found |= fetches(bench, reach) if access >= codes.READS else {}
        if access >= codes.WRITES:
            found |= {**fills(bench, reach), **folds(bench, reach)}
    return found
