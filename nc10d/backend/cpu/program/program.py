"""Programs: a rank's part of a collective, as a list of small steps (made by `steps`).

An algorithm is a pure function that returns steps; the simulator runs them in Python, the engine
runs the same steps natively after `link` has packed them into integers. Nothing here touches
shared memory.

How ranks keep in step: every rank of a group has a counter that only grows. A program's round
spends `ticks` (phases); every rank's version of a program spends the same ticks, so programs mix
freely and need no further protocol. `signal(t)` sets this rank's counter to (ticks spent so far +
t); `wait(peer, t)` waits until the peer's counter has come there. A rank's staging buffer has two
slots, as its inline payload has, which alternate from round to round. A round's `free` is the first
tick (counted from the round's start) at which every peer has left the round for sure, and `free()`
waits for that before the same slot is used again. A rank that reads from the round before
(`earlier`) has left that round when the reads of this round are done.

`end_round` and `loop` can repeat earlier steps. An iteration is called a segment; an operand moves
on by its stride from segment to segment.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nc10d.arrays.call_info import CallInfo
from nc10d.arrays.dtypes import ElementType
from nc10d.backend.cpu.native.step_kinds import StepKind as StepKind

LINE = 64
"""The bytes in a cache line: chunks are cut at multiples, so that ranks never share a line."""


def line_up(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


def line_down(nbytes: int) -> int:
    """Round down to whole cache lines."""
    return nbytes // LINE * LINE


class Space(enum.IntEnum):
    """An operand's memory; EARLIER is the slot from the round before, CELL a link's."""

    NONE = 0
    USER = 1
    STAGING = 2
    INLINE = 3
    SCRATCH = 4
    EARLIER = 5
    CELL = 6


SHARED = (Space.STAGING, Space.INLINE, Space.EARLIER, Space.CELL)
"""Memory that local peers can read."""
INLINE_BYTES = 16
"""Most bytes in a payload that travels in the counter's own cache line."""
GATE_BYTES = 16
"""Bytes in a gate: a word that is 0 or 1, and the mask of ranks that sleep on the gate."""


@dataclass(frozen=True, slots=True)
class At:
    """An address: (space, array or rank index) + offset + segment * stride, in bytes."""

    space: Space
    index: int
    offset: int = 0
    stride: int = 0


NOWHERE = At(Space.NONE, 0)


def moved(at: At, offset: int, stride: int | None = None) -> At:
    """Return the place `offset` bytes further, with another `stride` if that is given."""
    return At(at.space, at.index, at.offset + offset, at.stride if stride is None else stride)


def user(index: int, offset: int = 0, stride: int = 0) -> At:
    """Point into the call's array number `index`."""
    return At(Space.USER, index, offset, stride)


def staging(rank: int, offset: int = 0, stride: int = 0) -> At:
    """Point into the current slot in a rank's staging buffer."""
    return At(Space.STAGING, rank, offset, stride)


def earlier(rank: int, offset: int = 0, stride: int = 0) -> At:
    """Point into the slot in a rank's staging buffer that the round before used."""
    return At(Space.EARLIER, rank, offset, stride)


def scratch(offset: int, stride: int = 0) -> At:
    """Point into this rank's scratch memory."""
    return At(Space.SCRATCH, 0, offset, stride)


def cell() -> At:
    """Point to the data in a link's current cell."""
    return At(Space.CELL, 0)


def inline(rank: int) -> At:
    """Point to a rank's current inline slot."""
    return At(Space.INLINE, rank)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel by name: `link` turns it into an address, the simulator into NumPy."""

    # `kind` is a pairwise step's name ("SUM"...), "DIVIDE" (by a rank count), "SCALE" (by a float),
    # "BOTH_SUM" or "BOTH_AVG", which write to both operands, or the map of one's own reduction.

    kind: str
    dtype: ElementType


@dataclass(frozen=True, slots=True)
class Combine:
    """The kernels for a reduction of elements of `item` bytes: a pairwise kernel, a last map."""

    pair: Kernel
    last: Kernel | None = None
    last_arg: int = 0
    both: Kernel | None = None
    """For two ranks: the kernel that turns both contributions into the result in a single pass."""
    item: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """A step; its kind decides which fields it uses (see `steps`, whose arguments they are)."""

    kind: StepKind
    nbytes: int = 0
    tick: int = 0
    dst: At = NOWHERE
    src: At = NOWHERE
    own: At = NOWHERE
    also: At = NOWHERE
    kernel: Kernel | None = None
    last: Kernel | None = None
    both: Kernel | None = None
    arg: float = 0
    total: int = 0
    offset: int = 0
    peer: int = 0
    free_at: int = 0
    repeat: int = 0
    back: int = 0
    """How many steps before this one are repeated."""
    skip: int = 0
    rows: int = 0
    """How many steps behind this one are its transfers."""
    access: int = 0
    writable: int = 0
    flag: bool = False
    piece: int = 0
    most: int = 0
    block: int = 0
    """Bytes that are folded at a time: whole elements."""


Steps = Sequence[Step]


@dataclass(frozen=True, slots=True)
class Program:
    """A rank's steps and the call that they carry out; a launch brings `users` arrays."""

    call: CallInfo
    steps: tuple[Step, ...]
    users: int


def concatenate(call: CallInfo, programs: Sequence[Program]) -> Program:
    """Return a program that runs several in turn; their arrays are numbered through."""
    steps: list[Step] = []
    base = 0
    for program in programs:
        steps += [_shift(step, base) for step in program.steps]
        base += program.users
    return Program(call, tuple(steps), base)


def _shift(step: Step, base: int) -> Step:
    def moved(at: At) -> At:
        return replace(at, index=at.index + base) if at.space is Space.USER else at

    dst, src, own, also = map(moved, (step.dst, step.src, step.own, step.also))
    return replace(step, dst=dst, src=src, own=own, also=also)
