"""Predicts the time of collectives from their programs and a machine's constants.

A prediction walks the programs of a few ranks that represent all (timed_walk.py): the ranks of a
host where all hosts behave the same; in a broadcast, the path from the root to the last leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.model.collective_programs import Collective, layout_of
from benchmarks.model.machine import Machine
from benchmarks.model.timed_walk import Walk
from nc10d.backend.cpu.algorithms.group_shape import Topology
from nc10d.backend.cpu.algorithms.hosts_reduce import chained
from nc10d.backend.cpu.program.program import Space, StepKind

MANY = 64
"""Above this many ranks, two calls in a row are walked instead of three. A single call would not
do, since ranks run ahead of each other."""
ROOTED = ("broadcast", "reduce")


@dataclass(frozen=True, slots=True)
class Switch:
    """From `nbytes` on choose.py takes another algorithm: seconds just below, and at that size."""

    nbytes: int
    before: str
    after: str
    below: float
    above: float


def seconds(machine: Machine, op: str, nbytes: int, hosts: Topology) -> float:
    """Return the seconds of a call amid many in a row, on ranks of these hosts."""
    # A network that all hosts share is loaded by all ranks.
    ranks = range(hosts.size) if machine.shared else standing_for(op, nbytes, hosts)
    return steady(
        machine, Collective(op, nbytes, layout_of(hosts, thresholds=machine.thresholds)), ranks
    )


def steady(machine: Machine, collective: Collective, ranks: Sequence[int]) -> float:
    """Return the seconds from call to call if `ranks` represent all."""
    programs = {rank: collective.program(rank) for rank in ranks}
    turns = 2 if collective.layout.size > MANY else 3
    walk = Walk(machine, collective.hosts, programs, collective.arrays, turns)
    walk.run()
    return max((ends[-1] - ends[0]) / (turns - 1) for ends in walk.ends.values())


def standing_for(op: str, nbytes: int, hosts: Topology) -> list[int]:
    """Return the ranks to walk: all ranks of the hosts that decide the time.

    A large broadcast goes down a chain of hosts, a small broadcast down a binomial tree. The last
    leaf is the host whose number has the most set bits; clearing the lowest bit gives its parent.
    """
    if op not in ROOTED or len(hosts.hosts) == 1:
        return list(hosts.hosts[0])
    if op == "broadcast" and chained(len(hosts.hosts), nbytes):
        return list(range(hosts.size))
    leaf = (1 << len(hosts.hosts).bit_length() - 1) - 1
    path = [leaf]
    while path[-1]:
        path.append(path[-1] & (path[-1] - 1))
    return [rank for host in path for rank in hosts.hosts[host]]


def algorithm(machine: Machine, op: str, nbytes: int, hosts: Topology) -> str:
    """Return the name of the algorithm that choose.py takes on a machine."""
    layout, access = layout_of(hosts, thresholds=machine.thresholds), machine.access
    steps = Collective(op, nbytes, layout).program(hosts.hosts[0][0]).steps
    kinds = Counter(step.kind for step in steps)
    by_kernel = any(step.kind is StepKind.EXPOSE and 0 < step.access <= access for step in steps)
    if len(hosts.hosts) > 1:
        chain = op == "broadcast" and chained(len(hosts.hosts), nbytes)
        name = "chain of hosts" if chain else _across(op, kinds)
        return f"{name}, peers' arrays" if by_kernel else name
    if by_kernel:
        return "peers' arrays, by the kernel"
    if any(at.space is Space.INLINE for step in steps for at in (step.dst, step.src)):
        return "beside the counter"
    chunks = any(
        step.kind is StepKind.FOLD_STAGED and Space.STAGING in (step.dst.space, step.also.space)
        for step in steps
    )
    way = "staging, a chunk a rank" if chunks else "staging"
    return f"{way}, after asking for arrays" if StepKind.BRANCH_IF_FLAGGED in kinds else way


def _across(op: str, kinds: Counter[StepKind]) -> str:
    if op == "broadcast":
        return "tree of hosts"
    if op not in ("all_reduce", "reduce"):
        return "from rank to rank"
    if kinds[StepKind.PUSH]:
        return "rails between hosts"
    return "leaders, in one shot"


def switches(machine: Machine, op: str, hosts: Topology, sizes: Sequence[int]) -> Iterator[Switch]:
    """Yield the changes of algorithm between the first and the last of some sizes."""

    def name(nbytes: int) -> str:
        return algorithm(machine, op, nbytes, hosts)

    for low, end in pairwise(sizes):
        while (before := name(low)) != name(end):
            high = end
            while high - low > 4:
                middle = (low + high) // 8 * 4
                low, high = (middle, high) if name(middle) == before else (low, middle)
            below, above = (seconds(machine, op, nbytes, hosts) for nbytes in (low, high))
            yield Switch(high, before, name(high), below, above)
            low = high
