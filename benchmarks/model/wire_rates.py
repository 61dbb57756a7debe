"""Measures the cost of bytes between hosts, as constants of the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.model.measurements import Sample
from benchmarks.model.program_timer import MANY, ProgramTimer, often, repeated
from nc10d.backend.cpu.algorithms.hosts_reduce import SEGMENT
from nc10d.backend.cpu.program.program import Step, user
from nc10d.backend.cpu.program.steps import HEADER_BYTES, flow, give, loop, push, take


def exchange(timer: ProgramTimer, nbytes: int) -> list[Step]:
    """Return a flow from every rank to every rank, so that no rank can run far ahead."""
    gives = [give(peer, user(0), nbytes) for peer in timer.others]
    takes = [take(peer, user(1, i * nbytes), nbytes) for i, peer in enumerate(timer.others)]
    return flow([*gives, *takes])


def both_ways(timer: ProgramTimer, nbytes: int, count: int) -> list[Step]:
    """Return exchanges, each after a rendezvous of the hosts, as before each collective."""
    return [*met(timer), *exchange(timer, nbytes)] * count


def met(timer: ProgramTimer) -> list[Step]:
    """Return an exchange of the headers with which hosts synchronize.

    Headers matter: an AMD machine's kernel copies at half its speed to a destination that begins up
    to 31 bytes further into a page than its source. The first bytes through a socket begin a page
    there, and in memory NumPy's arrays begin 16 bytes into a page.
    """
    return exchange(timer, HEADER_BYTES)


def passed_on(timer: ProgramTimer, count: int) -> list[Step]:
    """Return flows of a few bytes around a ring, to each rank in turn."""
    size = 1 + len(timer.others)
    steps: list[Step] = []
    for turn in range(count):
        far = 1 + turn % len(timer.others)
        to, source = (timer.rank - far) % size, (timer.rank + far) % size
        steps += flow([give(to, user(0), 8), take(source, user(1), 8)])
    return steps


def one_way(timer: ProgramTimer, nbytes: int, count: int) -> list[Step]:
    """Return flows from each rank in turn to all others, each after a rendezvous of the hosts.

    A constant sender would run ahead, and receivers would find the bytes already there.
    """
    steps: list[Step] = []
    for turn in range(count):
        root = turn % (1 + len(timer.others))
        steps += met(timer)
        if root == timer.rank:
            steps += to_all(timer, nbytes)
        else:
            steps += flow([take(root, user(0), nbytes)])
    return [*steps, *met(timer)]


def to_all(timer: ProgramTimer, nbytes: int) -> list[Step]:
    """Return flows to all others, cut as a broadcast's are."""
    if len(timer.others) == 1:
        return flow([give(timer.others[0], user(0), nbytes)])
    here = user(0, 0, SEGMENT)
    rows = [replace(give(peer, here, SEGMENT), total=nbytes) for peer in timer.others]
    return loop(flow(rows), -(-nbytes // SEGMENT))


def latencies(timer: ProgramTimer) -> Sample:
    """Time a few bytes between hosts, which all ranks pass on at once, as in a rendezvous."""
    count = len(timer.others)
    x, y = np.zeros(8, np.uint8), np.zeros(8 * count, np.uint8)

    def pushed() -> float:
        seconds = timer.run(flow([push(peer, user(0), 8) for peer in timer.others]), x, y)
        timer.run(exchange(timer, 8), x, y)
        return seconds / count

    few, many = (passed_on(timer, count) for count in (MANY, 4 * MANY))
    # Ranks do not begin at the same moment; both times include that.
    short = repeated(lambda: timer.run(few, x, y), 50)
    small = (repeated(lambda: timer.run(many, x, y), 50) - short) / (3 * MANY)
    send = min(repeated(pushed, 50), small / 2)
    return {("hop", 0): small - send, ("send", 0): send}


def streams(timer: ProgramTimer, reach: int) -> Sample:
    """Time a byte between hosts, in both directions at once and in a single direction.

    `reach` counts the bytes to all other ranks, and those to a rank once more.
    """
    count = len(timer.others)
    each = reach // (1 + count)
    assert each >= HEADER_BYTES, reach
    # Ones, because unwritten zeros all share a page of the kernel.
    x, y = np.ones(each, np.uint8), np.ones(count * each, np.uint8)

    def rate(way: Callable[[ProgramTimer, int, int], list[Step]]) -> float:
        small = repeated(lambda: timer.run(way(timer, 8, MANY), x, y), often(8))
        large = repeated(lambda: timer.run(way(timer, each, MANY), x, y), often(each))
        return (large - small) / (MANY * count * each)

    return {("stream", reach): rate(both_ways), ("one_way", reach): rate(one_way)}
