"""Collectives as (programs of all ranks, their arrays, the expected contents of each array).

`play` runs them in a simulated world.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nc10d.arrays.call_info import CallInfo
from nc10d.arrays.dtypes import DType, element_of
from nc10d.backend.cpu.algorithms import choose, message
from nc10d.backend.cpu.algorithms.all_reduce import FusedArray
from nc10d.backend.cpu.algorithms.exchange import Route
from nc10d.backend.cpu.algorithms.group_shape import GroupShape, Topology
from nc10d.backend.cpu.algorithms.hosts_exchange import local_first
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.program import Program, Step, StepKind, user
from nc10d.ops import AVG, MAX, SUM, ReduceOp, premul_sum
from nc10d.ops.own_reductions import own_reduction
from nc10d.ops.reductions import kind_of_own
from simulation.race_simulator.simulator import CELLS
from simulation.race_simulator.vector_clocks import PAIR

Array = npt.NDArray[Any]


@dataclass
class Case:
    """A collective of a world: program, arrays and expected arrays of each rank."""

    name: str
    programs: list[Program]
    arrays: list[list[Array]]
    expected: list[list[Array]]


def layouts(size: int, slot: int, small: int, hosts: Topology | None = None) -> list[GroupShape]:
    return [GroupShape(size, rank, slot, small, hosts) for rank in range(size)]


def data(seed: int, rank: int, count: int) -> Array:
    return np.random.default_rng((seed, rank)).integers(-1000, 1000, count)


def program(name: str, steps: list[Step], users: int, detail: str = "") -> Program:
    return Program(CallInfo(name, detail=detail), tuple(steps), users)


def fold(arrays: list[Array], op: ReduceOp) -> Array:
    if op == MAX:
        return np.maximum.reduce(arrays)
    total = np.sum(arrays, axis=0) if arrays[0].size else arrays[0].copy()
    if op == AVG:
        return np.trunc(total / len(arrays)).astype(np.int64)
    return total * int(op.factor or 1)


def reduction(op: ReduceOp, size: int) -> Reduction:
    return Reduction(op, DType.INT64, size)


def all_reduce(world: list[GroupShape], count: int, seed: int, op: ReduceOp = SUM) -> Case:
    size = len(world)
    arrays = [data(seed, r, count) for r in range(size)]
    how = reduction(op, size)
    programs = [program("all_reduce", choose.all_reduce(w, 8 * count, how), 1) for w in world]
    total = fold(arrays, op)
    return Case("all_reduce", programs, [[a] for a in arrays], [[total]] * size)


def reduce(world: list[GroupShape], count: int, seed: int, op: ReduceOp = SUM) -> Case:
    size, root = len(world), seed % len(world)
    arrays = [data(seed, r, count) for r in range(size)]
    how = reduction(op, size)
    programs = [program("reduce", choose.all_reduce(w, 8 * count, how, root), 1) for w in world]
    expected = [[arrays[r].copy()] for r in range(size)]
    expected[root] = [fold(arrays, op)]
    return Case("reduce", programs, [[a] for a in arrays], expected)


def fused(world: list[GroupShape], count: int, seed: int) -> Case:
    size = len(world)
    counts = [1 + (seed + i) % max(1, min(count, world[0].slot_bytes // 256)) for i in range(3)]
    arrays = [[data(seed + i, r, c) for i, c in enumerate(counts)] for r in range(size)]
    parts = [FusedArray(i, 8 * c, reduction(SUM, size)) for i, c in enumerate(counts)]
    programs = [program("fused", choose.fused(w, parts), len(parts)) for w in world]
    total = [fold([arrays[r][i] for r in range(size)], SUM) for i in range(len(counts))]
    return Case("fused", programs, arrays, [total] * size)


AFFINE = np.dtype([("factor", "i4"), ("offset", "i8")])
"""A record of 12 bytes, whose borders are at no multiple of a cache line's parts."""


def composed(f: Any, g: Any) -> Any:
    return f.factor * g.factor, f.factor * g.offset + f.offset


def composed_arrays(f: Array, g: Array) -> Array:
    result = np.empty_like(f)
    result["factor"] = f["factor"] * g["factor"]
    result["offset"] = f["factor"] * g["offset"] + f["offset"]
    return result


OWN = ReduceOp(
    kind_of_own(own_reduction({"step": composed}, lambda place: AFFINE, "maps", None, 0))
)
"""The composition of affine maps: associative, not commutative."""
PAIR[OWN.pairwise.name] = composed_arrays


def maps(seed: int, rank: int, count: int) -> Array:
    found = np.zeros(count, AFFINE)
    found["factor"], found["offset"] = data(seed, rank, count) % 3 - 1, data(seed, 99 - rank, count)
    return found


def floats(seed: int, rank: int, count: int) -> Array:
    chance = np.random.default_rng((seed, rank))
    found: Array = chance.standard_normal(count) * 10.0 ** chance.integers(-9, 9, count)
    return found


ORDERED = {"own": (OWN, maps, composed_arrays), "sum": (SUM.ordered, floats, np.add)}


def ordered_all_reduce(
    world: list[GroupShape], count: int, seed: int, what: str, rooted: bool
) -> Case:
    op, make, step = ORDERED[what]
    size, root = len(world), seed % len(world) if rooted else -1
    arrays = [make(seed, r, count) for r in range(size)]
    how = Reduction(op, element_of(arrays[0].dtype), size)
    programs = [
        program("all_reduce", choose.all_reduce(w, arrays[0].nbytes, how, root), 1) for w in world
    ]
    total = functools.reduce(step, arrays)
    expected = [[total if root in (-1, r) else arrays[r].copy()] for r in range(size)]
    return Case("all_reduce", programs, [[a] for a in arrays], expected)


def ordered_reduce_scatter(world: list[GroupShape], count: int, seed: int, what: str) -> Case:
    op, make, step = ORDERED[what]
    size = len(world)
    counts = [count] * size if seed % 2 else ragged(size, count, seed)
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    arrays = [make(seed, r, starts[-1]) for r in range(size)]
    item = arrays[0].dtype.itemsize
    inps, sizes = [user(1, item * s) for s in starts[:-1]], [item * c for c in counts]
    how = Reduction(op, element_of(arrays[0].dtype), size)
    programs = [
        program("reduce_scatter", choose.reduce_scatter(w, sizes, user(0), inps, how), 2)
        for w in world
    ]
    users = [[make(0, 0, counts[r]), arrays[r]] for r in range(size)]
    total = functools.reduce(step, arrays)
    expected = [[total[starts[r] : starts[r + 1]], arrays[r].copy()] for r in range(size)]
    return Case("reduce_scatter", programs, users, expected)


def broadcast(world: list[GroupShape], count: int, seed: int) -> Case:
    size, root = len(world), seed % len(world)
    arrays = [data(seed, r, count) for r in range(size)]
    programs = [program("broadcast", choose.broadcast(w, 8 * count, root), 1) for w in world]
    want = arrays[root].copy()
    return Case("broadcast", programs, [[a] for a in arrays], [[want]] * size)


def barrier(world: list[GroupShape], count: int, seed: int) -> Case:
    programs = [program("barrier", choose.barrier(w), 0) for w in world]
    return Case("barrier", programs, [[] for _ in world], [[] for _ in world])


def ragged(size: int, count: int, seed: int) -> list[int]:
    if seed % 4 == 0:  # some have nothing
        return [count * ((r + seed // 4) % 2) for r in range(size)]
    return [(count * (r + seed) // 3) % (count + 1) for r in range(size)]


def all_gather(world: list[GroupShape], count: int, seed: int, *, into_one: bool = False) -> Case:
    size = len(world)
    counts = [count] * size if seed % 2 else ragged(size, count, seed)
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    arrays = [data(seed, r, c) for r, c in enumerate(counts)]
    outs = [user(1, 8 * starts[r]) if into_one else user(1 + r) for r in range(size)]
    sizes = [8 * c for c in counts]
    many = 2 if into_one else 1 + size
    programs = [
        program("all_gather", choose.all_gather(w, sizes, user(0), outs), many) for w in world
    ]
    got = [np.concatenate(arrays)] if into_one else arrays
    users = [[arrays[r], *[np.full(a.size, -1) for a in got]] for r in range(size)]
    expected = [[arrays[r].copy(), *[a.copy() for a in got]] for r in range(size)]
    return Case("all_gather", programs, users, expected)


def reduce_scatter(world: list[GroupShape], count: int, seed: int) -> Case:
    size = len(world)
    counts = [count] * size if seed % 2 else ragged(size, count, seed)
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    arrays = [data(seed, r, starts[-1]) for r in range(size)]
    inps = [user(1, 8 * s) for s in starts[:-1]]
    op = (SUM, AVG, MAX, premul_sum(3.0))[seed % 4]
    how, sizes = reduction(op, size), [8 * c for c in counts]
    programs = [
        program("reduce_scatter", choose.reduce_scatter(w, sizes, user(0), inps, how), 2)
        for w in world
    ]
    users = [[np.full(counts[r], -1), arrays[r]] for r in range(size)]
    total = fold([a.copy() for a in arrays], op)
    expected = [[total[starts[r] : starts[r + 1]], arrays[r].copy()] for r in range(size)]
    return Case("reduce_scatter", programs, users, expected)


def even_all_to_all(world: list[GroupShape], count: int, seed: int) -> Case:
    size = len(world)
    arrays = [data(seed, r, count * size) for r in range(size)]
    sends = [user(0, 8 * count * r) for r in range(size)]
    recvs = [user(1, 8 * count * r) for r in range(size)]
    programs = [
        program("all_to_all", choose.even_all_to_all(w, 8 * count, sends, recvs), 2) for w in world
    ]
    users = [[a, np.full(count * size, -1)] for a in arrays]
    cut = [a.reshape(size, count) for a in arrays]
    expected = [[arrays[r].copy(), np.concatenate([c[r] for c in cut])] for r in range(size)]
    return Case("all_to_all", programs, users, expected)


def uneven_exchange(world: list[GroupShape], count: int, seed: int) -> Case:
    size = len(world)
    return exchange(world, np.random.default_rng(seed).integers(0, count + 1, (size, size)), seed)


def gather(world: list[GroupShape], count: int, seed: int) -> Case:
    size = len(world)
    matrix = np.zeros((size, size), np.int64)
    matrix[:, seed % size] = ragged(size, count, seed)
    return exchange(world, matrix, seed, to_one=True)


def exchange(
    world: list[GroupShape], matrix: npt.NDArray[np.int64], seed: int, *, to_one: bool = False
) -> Case:
    """An exchange of matrix[r, d] elements from rank r to rank d."""
    size = len(world)
    programs, users, expected = [], [], []
    arrays = [[data(seed + d, r, int(matrix[r, d])) for d in range(size)] for r in range(size)]
    for r, layout in enumerate(world):
        send, recv = 8 * matrix[r], 8 * matrix[:, r]
        sends = [user(1 + d) for d in range(size)]
        recvs = [user(1 + size + s) for s in range(size)]
        route = Route(sends, send.tolist(), recvs, recv.tolist(), to_one)
        programs.append(program("exchange", choose.announced(layout, route), 1 + 2 * size))
        blank = [np.full(int(c), -1) for c in matrix[:, r]]
        order = local_first(layout)
        head = [np.stack([send[order], recv[order]], axis=1).ravel(), *arrays[r]]
        users.append([*head, *blank])
        expected.append([a.copy() for a in [*head, *[arrays[s][r] for s in range(size)]]])
    return Case("exchange", programs, users, expected)


def reduced(op: ReduceOp) -> Callable[[list[GroupShape], int, int], Case]:
    return lambda world, count, seed: all_reduce(world, count, seed, op)


MAKERS: dict[str, Callable[[list[GroupShape], int, int], Case]] = {
    "all_reduce": all_reduce,
    "all_reduce_avg": reduced(AVG),
    "all_reduce_premul": reduced(premul_sum(2.0)),
    "reduce": reduce,
    **{
        f"{name}_{what}": functools.partial(ordered_all_reduce, what=what, rooted=name == "reduce")
        for what in ORDERED
        for name in ("all_reduce", "reduce")
    },
    **{
        f"reduce_scatter_{what}": functools.partial(ordered_reduce_scatter, what=what)
        for what in ORDERED
    },
    "fused": fused,
    "broadcast": broadcast,
    "barrier": barrier,
    "all_gather": all_gather,
    "all_gather_into_one": functools.partial(all_gather, into_one=True),
    "reduce_scatter": reduce_scatter,
    "even_all_to_all": even_all_to_all,
    "uneven_exchange": uneven_exchange,
    "gather": gather,
}


def messages(counts: list[int], *direct: int) -> list[Case]:
    """Messages over a link from rank 0 to 1; those of `direct` bytes are read from their array."""
    cases = []
    for number, count in enumerate(counts):
        sent = np.arange(count) + 1000 * number
        ends = {"send": message.send, "recv": message.recv}
        programs = [
            program(name, end(1024, 8 * count, *direct, cells=CELLS), 1)
            for name, end in ends.items()
        ]
        arrays = [[sent.copy()], [np.full(count, -1)]]
        cases.append(Case("message", programs, arrays, [[sent], [sent]]))
    return cases


WAITS = {StepKind.WAIT, StepKind.WAIT_ALL, StepKind.FREE, StepKind.MEET_ALL}
IDLE = Step(StepKind.WAIT, tick=-(10**9))
"""A wait that does not wait, and does not compare fingerprints."""


def without(program: Program, index: int) -> Program:
    """Return the program with one of its steps idle."""
    steps = list(program.steps)
    steps[index] = IDLE
    return replace(program, steps=tuple(steps))


class World(Protocol):
    """A simulated world: ranks of a host, or of several."""

    def submit(self, rank: int, program: Program, users: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Queue a program on a rank."""

    def run(self, choose: Callable[[int], int] | None = None) -> None:
        """Run all programs."""


def submit(world: World, case: Case) -> None:
    """Queue a case on all ranks."""
    for rank, planned in enumerate(case.programs):
        world.submit(rank, planned, [array.view(np.uint8) for array in case.arrays[rank]])


def play(world: World, cases: list[Case], choose: Callable[[int], int] | None) -> None:
    """Run cases back to back and compare every array with its expected contents."""
    for case in cases:
        submit(world, case)
    world.run(choose)
    for case in cases:
        for got, want in zip(case.arrays, case.expected, strict=True):
            for x, expected in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, expected, err_msg=case.name)


def caught(play: Callable[[], object]) -> bool:
    """Return whether a run meets a race, a deadlock, a disagreement, or a wrong element."""
    try:
        play()
    except AssertionError:
        return True
    return False
