"""What bytes between hosts cost, as constants of the cost model: programs, and their timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.model.runner import MANY, Bench, often, repeated
from benchmarks.model.samples import Sample
from nc10d.backend.cpu.algorithms.hosts_reduce import SEGMENT
from nc10d.backend.cpu.algorithms.hosts_steps import HEADER_BYTES, flow, give, loop, push, take
from nc10d.backend.cpu.program.program import Step, user


def exchange(bench: Bench, nbytes: int) -> list[Step]:
    """Return a flow from everyone to everyone, so that no rank can run far ahead."""
    gives = [give(peer, user(0), nbytes) for peer in bench.others]
    takes = [take(peer, user(1, i * nbytes), nbytes) for i, peer in enumerate(bench.others)]
    return flow([*gives, *takes])


def both_ways(bench: Bench, nbytes: int, count: int) -> list[Step]:
    """Return exchanges, each after hosts have met, as before each collective."""
    return [*met(bench), *exchange(bench, nbytes)] * count


def met(bench: Bench) -> list[Step]:
    """Return an exchange of what hosts show each other when they meet.

    Headers matter: an AMD machine's kernel copies at half its speed to what begins up to 31 bytes
    further into a page than what it copies. What goes first through a socket begins a page there,
    and in memory NumPy's arrays begin 16 bytes into one.
    """
    return exchange(bench, HEADER_BYTES)


def passed_on(bench: Bench, count: int) -> list[Step]:
    """Return flows of a few bytes around a ring, to one rank after another."""
    size = 1 + len(bench.others)
    steps: list[Step] = []
    for turn in range(count):
        far = 1 + turn % len(bench.others)
        to, source = (bench.rank - far) % size, (bench.rank + far) % size
        steps += flow([give(to, user(0), 8), take(source, user(1), 8)])
    return steps


def one_way(bench: Bench, nbytes: int, count: int) -> list[Step]:
    """Return flows from each rank in turn to everyone, each after hosts have met.

    One that always sent would run ahead: its mates would take what came before.
    """
    steps: list[Step] = []
    for turn in range(count):
        root = turn % (1 + len(bench.others))
        steps += met(bench)
        if root == bench.rank:
            steps += to_all(bench, nbytes)
        else:
            steps += flow([take(root, user(0), nbytes)])
    return [*steps, *met(bench)]


def to_all(bench: Bench, nbytes: int) -> list[Step]:
    """Return flows to all others, cut as a broadcast's are."""
    if len(bench.others) == 1:
        return flow([give(bench.others[0], user(0), nbytes)])
    here = user(0, 0, SEGMENT)
    rows = [replace(give(peer, here, SEGMENT), total=nbytes) for peer in bench.others]
    return loop(flow(rows), -(-nbytes // SEGMENT))


def latencies(bench: Bench) -> Sample:
    """Time a few bytes between hosts, which all ranks pass on at once, as when hosts meet."""
    count = len(bench.others)
    x, y = np.zeros(8, np.uint8), np.zeros(8 * count, np.uint8)

    def pushed() -> float:
        seconds = bench.run(flow([push(peer, user(0), 8) for peer in bench.others]), x, y)
        bench.run(exchange(bench, 8), x, y)
        return seconds / count

    few, many = (passed_on(bench, count) for count in (MANY, 4 * MANY))
    # Ranks do not begin at the same moment: that is in both.
    short = repeated(lambda: bench.run(few, x, y), 50)
    small = (repeated(lambda: bench.run(many, x, y), 50) - short) / (3 * MANY)
    send = min(repeated(pushed, 50), small / 2)
    return {("hop", 0): small - send, ("send", 0): send}


def streams(bench: Bench, reach: int) -> Sample:
    """Time a byte between hosts, both ways at once and one way.

    `reach` is what is sent to all others, and to one of them once more.
    """
    count = len(bench.others)
    each = reach // (1 + count)
    assert each >= HEADER_BYTES, reach
    # Ones, since zeros that nobody has written are one page of the kernel's.
    x, y = np.ones(each, np.uint8), np.ones(count * each, np.uint8)

    def rate(way: Callable[[Bench, int, int], list[Step]]) -> float:
        small = repeated(lambda: bench.run(way(bench, 8, MANY), x, y), often(8))
        large = repeated(lambda: bench.run(way(bench, each, MANY), x, y), often(each))
        return (large - small) / (MANY * count * each)

    return {("stream", reach): rate(both_ways), ("one_way", reach): rate(one_way)}
