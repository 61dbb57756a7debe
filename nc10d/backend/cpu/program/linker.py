"""The linker: turn a program's steps into the integers that the engine runs.

Operands become selectors into the channel's tables, kernels become addresses. A wrong selector
would crash the process, so `check` looks at every program once before packing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.native import offsets, slow_steps
from nc10d.backend.cpu.native import step_format as packed
from nc10d.backend.cpu.program.program import (
    LINE,
    SHARED,
    At,
    Kernel,
    Program,
    Space,
    Step,
    StepKind,
)
from nc10d.kernels import copy

Bytes = npt.NDArray[np.uint8]
Address = Callable[[Kernel], int]
"""The function that returns a kernel's address."""
ABROAD = {kind for kind in StepKind if kind > StepKind.FLOW} - {StepKind.CALL_HEADER}
"""Steps whose peer is any rank in the group; other steps' peer is a local rank."""
SLOW_STEPS = {kind for kind in StepKind if StepKind.AGREE <= kind < StepKind.FLOW}
"""Steps that slow_steps.py carries out."""
CALLS = (StepKind.ENTER, StepKind.CALL_HEADER, StepKind.CHECK_HEADER)
"""Steps that know the call."""
COPIES = (StepKind.COPY, StepKind.FETCH, StepKind.FILL_EXPOSED, StepKind.FOLD_STAGED)
"""Steps that copy bytes; the linker chooses the function that does."""
OPERANDS = packed.DST, packed.SRC, packed.OWN
"""Operands that may lie in scratch memory."""
MANY = 1 << 30
SHORT = 512 * 1024
"""Bytes up to which a program is short: some tens of microseconds."""


@dataclass(slots=True)
class Linked:
    """A program that the engine can run: packed steps, and the memory that they point to."""

    program: Program
    code: npt.NDArray[np.int64]
    record: Bytes
    factor: npt.NDArray[np.float64]
    scratch: Bytes
    address: int = field(init=False)
    short: int = field(init=False)
    """1 if the launching thread should advance the program at once: few bytes, short waits."""

    def __post_init__(self) -> None:
        self.address = self.code.ctypes.data
        self.short = int(_moved(self.program.steps) <= SHORT)


class Scratch:
    """Memory for a channel's programs in turn, which grows; a linked program keeps its own."""

    def __init__(self) -> None:
        self._room: Bytes = np.zeros(0, np.uint8)

    def room(self, nbytes: int) -> Bytes:
        """Return memory for at least `nbytes`, from a cache line's start on."""
        if nbytes > self._room.size:
            most = max(nbytes, 2 * self._room.size)
            room = np.zeros(most + LINE, np.uint8)
            start = -room.ctypes.data % LINE
            self._room = room[start : start + most]
        return self._room


def link(
    program: Program,
    size: int,
    table: int,
    kernel_address: Address,
    scratch: Callable[[int], Bytes] | None = None,
) -> Linked:
    """Pack a program for a channel with `size` ranks whose tables start at byte `table`."""
    # `scratch` returns memory for intermediate results in a program that crosses hosts. May block
    # to compile kernels and slow-path steps.
    check(program, size)
    if any(step.kind in SLOW_STEPS for step in program.steps):
        slow_steps.prepare()
    room = scratch(scratch_bytes(program)) if scratch is not None else np.zeros(0, np.uint8)
    record = np.frombuffer(program.call.text_bytes(offsets.TEXT_BYTES), np.uint8).copy()
    factors = [step.arg for step in program.steps if isinstance(step.arg, float)]
    code = np.zeros((len(program.steps) + 1, packed.STEP // 8), np.int64)
    linked = Linked(program, code, record, np.array(factors, np.float64), room)
    factor = linked.factor.ctypes.data
    called = record.ctypes.data, program.call.fingerprint()
    for row, step, copier in zip(linked.code, program.steps, copiers(program), strict=False):
        row[:] = _pack(step, *called, size, table, kernel_address, copier)
        for place, at in zip(OPERANDS, (step.dst, step.src, step.own), strict=True):
            if at.space is Space.SCRATCH:
                row[place // 8 + 1] += room.ctypes.data
        if isinstance(step.arg, float):
            row[packed.ARG // 8] = factor
            factor += 8
    return linked


def check(program: Program, size: int) -> None:
    """Assert that no step points outside its tables or its round, which would crash the process."""
    later = False  # a program's first round must not read from an earlier round
    for index, step in enumerate(program.steps):
        assert 0 <= step.peer < size or step.kind in ABROAD, (program.call, index, step)
        assert step.nbytes >= 0, (program.call, index, step)
        assert 0 <= step.back <= index, (program.call, index, step)
        assert 0 <= step.skip < len(program.steps) - index, (program.call, index, step)
        if step.kind is StepKind.FOLD_EXPOSED:
            assert step.most > 0, (program.call, index, step)
            assert step.also.space is Space.STAGING, (program.call, index, step)
        for at in (step.dst, step.src, step.own, step.also):
            limit = {Space.NONE: 1, Space.USER: program.users, Space.SCRATCH: 1}.get(at.space, size)
            assert 0 <= at.index < limit, (program.call, index, step)
            assert at.offset >= 0, (program.call, index, step)
            assert at.space is not Space.EARLIER or later, (program.call, index, step)
        for at in (step.dst, step.also):
            assert at.space is not Space.EARLIER, (program.call, index, step)
        later = later or step.kind is StepKind.ROUND


def scratch_bytes(program: Program) -> int:
    """Return how much scratch memory a program needs."""
    places = [(step, at) for step in program.steps for at in (step.dst, step.src, step.own)]
    # A place that advances with the segments goes as far as the step's total.
    ends = (
        at.offset + (max(step.nbytes, step.total) if at.stride else step.nbytes)
        for step, at in places
        if at.space is Space.SCRATCH
    )
    return max(ends, default=0)


def copiers(program: Program) -> list[int]:
    """Return the address of each step's copy function; 0: the C library's, or no copy."""
    # Arrays that fill the cache go past it, unless the program also reads them. May compile.
    steps = program.steps
    # An exposed array is read by peers, not by the step.
    reading = [step for step in steps if step.kind is not StepKind.EXPOSE]
    sources = [at for step in reading for at in (step.src, step.own)]
    read = {at.index for at in sources if at.space is Space.USER}
    # By destination: a program with two branches has some copies in both, and takes one branch.
    filled: dict[tuple[StepKind, At], int] = {}
    for step, times in zip(steps, _times(steps), strict=True):
        much = step.nbytes * times
        filled[step.kind, step.dst] = min(much, step.total) if step.total else much
    whole: Counter[tuple[StepKind, int]] = Counter()
    for (kind, at), nbytes in filled.items():
        if at.space is Space.USER and at.index not in read:
            whole[kind, at.index] += nbytes
    return [_copier(step, whole[step.kind, step.dst.index]) for step in steps]


def _copier(step: Step, in_all: int) -> int:
    """Return a step's copy function if `in_all` bytes go into its user array."""
    if step.kind not in COPIES:
        return 0
    if step.kind is StepKind.FOLD_STAGED:  # that step copies from the L1 cache
        in_all = 0
    elif step.kind is StepKind.FILL_EXPOSED:
        in_all = step.nbytes
    elif step.dst.space is not Space.USER:
        in_all = 0
    return copy.copier(min(step.nbytes, step.total or step.nbytes), in_all)


def _moved(steps: Sequence[Step]) -> int:
    """Return the bytes that the steps move at most, all branches together."""
    moved = 0
    for step, times in zip(steps, _times(steps), strict=True):
        moved += min(step.nbytes * times, step.total or MANY)
    return moved


def _times(steps: Sequence[Step]) -> list[int]:
    """Return how often each step is carried out; MANY if the ranks agree on that at run time."""
    times = [1] * len(steps)
    for index, step in enumerate(steps):
        repeat = MANY if step.kind is StepKind.LOOP_AGREED else max(1, step.repeat)
        for inside in range(index - step.back, index):
            times[inside] *= repeat
    return times


ROWS = {
    Space.STAGING: 0,
    Space.INLINE: offsets.TABLE_INLINE,
    Space.CELL: offsets.TABLE_INLINE,  # links have no inline slots
    Space.EARLIER: offsets.TABLE_OTHER,
    Space.SCRATCH: offsets.TABLE_ZEROS,  # a word that is 0: the offset is an address
}
"""The row in the channel's tables for each kind of memory."""


def _selector(at: At, size: int, table: int) -> int:
    # Users' arrays have selectors from their table's front. Shared places have negative selectors,
    # into the channel's tables: staging buffers, inline slots, and the other slot's.
    if at.space is Space.NONE:
        return packed.NO_OPERAND
    if at.space is Space.USER:
        return 8 * at.index
    return -(table + 8 * (ROWS[at.space] * size + at.index))


def _pack(
    step: Step, record: int, fingerprint: int, size: int, table: int, address: Address, copier: int
) -> list[int]:
    """Return a packed step's words (step_format.py)."""
    operands = []
    for at in (step.dst, step.src, step.own, step.also):
        operands += [_selector(at, size, table), at.offset, at.stride]
    kernel, last, both = (
        0 if each is None else address(each) for each in (step.kernel, step.last, step.both)
    )
    if step.kind in CALLS:
        fingerprint |= step.flag << offsets.FLAG_BIT
    else:
        record = fingerprint = 0
    arg = 0 if isinstance(step.arg, float) else step.arg  # `link` stores a float's address
    staged = step.kind is StepKind.FOLD_STAGED and step.dst.space in SHARED
    # A step has one of the fields that share a word.
    return [
        step.kind,
        step.nbytes,
        step.tick or step.writable,
        *operands,
        kernel or step.repeat or record,
        last or step.free_at,
        arg or step.access or step.piece or fingerprint,
        step.total or step.offset,
        step.peer or step.skip or step.back or step.rows or step.most or step.flag or staged,
        both or copier,
        step.block,
    ]
