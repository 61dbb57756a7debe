"""Traffic for stress tests: collectives with changing data, and the right value of every element.

A script is a list of steps that follows from a seed, the same on all ranks; what a rank decides for
itself (delays, the order of its waits and posts) follows from the seed and its rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import nc10d as dist

Words = npt.NDArray[np.int64]
Checks = list[tuple[Words, Words]]
COUNTS = (0, 1, 2, 7, 300, 3000, 9001, 40_000, 150_001)


def data(rank: int, number: int, count: int) -> Words:
    """The contribution of `rank` to call `number`: no two calls have the same."""
    return (np.arange(count) * 7 + rank * 1009 + number * 31) % 10007


@dataclass
class Call:
    """A collective of a rank: how to launch it, and the expected contents of its arrays."""

    launch: Callable[[bool], Any]
    checks: Checks = field(default_factory=list)

    def check(self, label: object) -> None:
        for got, want in self.checks:
            if not np.array_equal(got, want):
                first = int(np.flatnonzero(got != want)[0])
                raise AssertionError(f"{label}: element {first} is {got[first]}, not {want[first]}")


def all_reduce(group: Any, number: int, count: int, root: int) -> Call:
    del root
    x = data(group.rank, number, count)
    want = sum(data(rank, number, count) for rank in range(group.size))
    return Call(lambda later: group.all_reduce(x, async_op=later), [(x, np.asarray(want))])


def reduce(group: Any, number: int, count: int, root: int) -> Call:
    x = data(group.rank, number, count)
    mine = [data(rank, number, count) for rank in range(group.size)]
    want = np.asarray(sum(mine)) if group.rank == root else x.copy()
    return Call(lambda later: group.reduce(x, root, async_op=later), [(x, want)])


def broadcast(group: Any, number: int, count: int, root: int) -> Call:
    x = data(group.rank, number, count)
    want = data(root, number, count)
    return Call(lambda later: group.broadcast(x, root, async_op=later), [(x, want)])


def all_gather(group: Any, number: int, count: int, root: int) -> Call:
    del root
    x, out = data(group.rank, number, count), np.full(count * group.size, -1)
    want = np.concatenate([data(rank, number, count) for rank in range(group.size)])
    return Call(lambda later: group.all_gather_into_tensor(out, x, async_op=later), [(out, want)])


def reduce_scatter(group: Any, number: int, count: int, root: int) -> Call:
    del root
    x, out = data(group.rank, number, count * group.size), np.full(count, -1)
    total = np.asarray(sum(data(r, number, count * group.size) for r in range(group.size)))
    want = total[group.rank * count : (group.rank + 1) * count]
    return Call(lambda later: group.reduce_scatter_tensor(out, x, async_op=later), [(out, want)])


def all_to_all(group: Any, number: int, count: int, root: int) -> Call:
    del root
    me = group.rank
    x, out = data(me, number, count * group.size), np.full(count * group.size, -1)
    parts = [
        data(r, number, count * group.size).reshape(group.size, -1)[me] for r in range(group.size)
    ]
    want = np.concatenate(parts)
    return Call(lambda later: group.all_to_all_single(out, x, async_op=later), [(out, want)])


def uneven(group: Any, number: int, count: int, root: int) -> Call:
    """Rank s sends rank r a piece of its own size, once in a while none."""
    del root

    def size(source: int, target: int) -> int:
        return (count * (1 + (source + 2 * target + number) % 3)) // 4

    me, ranks = group.rank, range(group.size)
    sends = [data(me, number + 1000 * r, size(me, r)) for r in ranks]
    outs = [np.full(size(r, me), -1) for r in ranks]
    checks = [(outs[r], data(r, number + 1000 * me, size(r, me))) for r in ranks]
    return Call(lambda later: group.all_to_all(outs, sends, async_op=later), checks)


def gather(group: Any, number: int, count: int, root: int) -> Call:
    x = data(group.rank, number, count)
    outs = [np.full(count, -1) for _ in range(group.size)] if group.rank == root else None
    checks = [(out, data(r, number, count)) for r, out in enumerate(outs or [])]
    return Call(lambda later: group.gather(x, outs, root, async_op=later), checks)


def scatter(group: Any, number: int, count: int, root: int) -> Call:
    out = np.full(count, -1)
    ranks = range(group.size)
    inps = [data(r, number, count) for r in ranks] if group.rank == root else None
    want = data(group.rank, number, count)
    return Call(lambda later: group.scatter(out, inps, root, async_op=later), [(out, want)])


def barrier(group: Any, number: int, count: int, root: int) -> Call:
    del number, count, root
    return Call(lambda later: group.barrier(async_op=later))


COLLECTIVES: dict[str, Callable[[Any, int, int, int], Call]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "uneven": uneven,
    "gather": gather,
    "scatter": scatter,
    "barrier": barrier,
}


class Traffic:
    """A rank in a script on some groups; `pending` are the calls that it still waits for."""

    def __init__(self, groups: Sequence[Any], seed: int, rank: int) -> None:
        self.groups = groups
        self.script = random.Random(seed)
        self.own = random.Random(seed * 1000 + rank)
        self.pending: list[tuple[Any, Call, object]] = []
        self.number = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.number += 10  # a batch numbers its calls from here on
            group = self.script.choice(self.groups)
            step = self.script.choice((self.one, self.one, self.one, self.batch, self.messages))
            plan = random.Random(self.script.randrange(1 << 30))
            if group is not None:
                self.linger()
                step(group, plan)
            if len(self.pending) > 12 or self.own.random() < 0.2:
                self.finish()
        self.finish()

    def linger(self) -> None:
        """Be late, by nothing or by some tenths of a millisecond."""
        for _ in range(self.own.choice((0, 0, 0, 200, 3000))):
            pass

    def call(self, group: Any, plan: random.Random, number: int) -> tuple[Call, object]:
        name, count = plan.choice(sorted(COLLECTIVES)), plan.choice(COUNTS)
        root = plan.randrange(group.size)
        label = (name, number, count, root, group.name, group.rank)
        return COLLECTIVES[name](group, number, count, root), label

    def one(self, group: Any, plan: random.Random) -> None:
        call, label = self.call(group, plan, self.number)
        if self.own.random() < 0.5:  # sync on one rank may be async on another
            call.launch(False)
            call.check(label)
        else:
            self.pending.append((call.launch(True), call, label))

    def batch(self, group: Any, plan: random.Random) -> None:
        calls = []
        with dist.coalescing_manager(group, async_ops=self.own.random() < 0.5) as block:
            for place in range(plan.randrange(1, 5)):
                calls.append(self.call(group, plan, self.number + place))
                calls[-1][0].launch(False)
        self.pending += [(block, call, label) for call, label in calls]

    def messages(self, group: Any, plan: random.Random) -> None:
        """Each rank posts its ends of some messages in a separate order."""
        mine = []
        for tag in range(plan.randrange(1, 10)):
            src, dst = plan.sample(range(group.size), 2)
            count = plan.choice(COUNTS)
            if group.rank in (src, dst):
                mine.append((src, dst, self.number + tag, count))
        self.own.shuffle(mine)
        for src, dst, tag, count in mine:
            label = ("message", src, dst, tag, count)
            sent = data(src, tag, count)
            if group.rank == src:
                self.pending.append((group.isend(sent, dst, tag=tag), Call(bool), label))
            else:
                x = np.full(count, -1)
                work = group.irecv(x, src, tag=tag)
                self.pending.append((work, Call(bool, [(x, sent)]), label))

    def finish(self) -> None:
        """Wait for the pending calls, in an order of this rank's own, and check them."""
        self.own.shuffle(self.pending)
        while self.pending:
            work, call, label = self.pending.pop()
            work.wait()
            call.check(label)
