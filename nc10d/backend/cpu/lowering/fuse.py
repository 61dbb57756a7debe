"""Several collectives as one program: in order, small all_reduces with a shared barrier.

A shared barrier needs arrays that do not overlap, and no wait between the all_reduces. Each rank
knows that for its own arrays only. A batch that could share barriers therefore begins with a
barrier at which any rank can set the flag: then all ranks run the operations in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from nc10d.arrays import intervals
from nc10d.arrays.buffer import Buffer
from nc10d.arrays.call_info import block_of
from nc10d.backend.cpu.algorithms import all_reduce
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.lowering.lower import LoweredOp
from nc10d.backend.cpu.lowering.ordering import BatchDependencies
from nc10d.backend.cpu.lowering.strided import packs, unpacks
from nc10d.backend.cpu.program import steps
from nc10d.backend.cpu.program.program import Program, Step, concatenate, line_up

Gates = tuple[tuple[int, tuple[int, ...], bool], ...]
"""For each collective its number in the batch, those that it awaits, whether another awaits it."""


def fuse(
    lowered: Sequence[LoweredOp],
    shape: GroupShape,
    dependencies: BatchDependencies | None,
    numbers: Sequence[int],
) -> LoweredOp:
    """Join collectives, by their places `numbers` in the batch, into a program in that order."""
    ops = [] if dependencies is None else [dependencies.ops[number] for number in numbers]
    gates = tuple((op.number, tuple(op.waits), op.awaited) for op in ops)
    runs = _runs(lowered, shape)
    disjoint = dependencies is None and _disjoint(lowered)
    arrays: list[Buffer | npt.NDArray[Any]] = []
    outs: list[int] = []
    for op in lowered:
        outs += [len(arrays) + i for i in op.outs]
        arrays += op.arrays
    if dependencies is not None:
        arrays.append(dependencies.words)

    def build() -> Program:
        call = block_of([op.build().call for op in lowered])
        whole = concatenate(call, _in_order(lowered, gates)).steps
        # Hosts hold no such vote, so a batch across hosts runs in order, which is always right.
        if len(runs) < len(lowered) and shape.size > 1 and shape.hosts is None:
            joined = concatenate(call, [_joined(run, shape) for run in runs]).steps
            whole = _vote(joined, whole, objects=not disjoint)
        return Program(call, whole, len(arrays))

    key = ("batch", disjoint, gates, *(op.key for op in lowered))
    return LoweredOp(key, arrays, tuple(outs), build)


def _disjoint(lowered: Sequence[LoweredOp]) -> bool:
    """Return whether no all_reduces' arrays overlap: else one must end before the other."""
    # Other collectives' arrays do not matter, because those are never joined.
    reduced = [op for op in lowered if op.part]
    arrays = [op.arrays[op.strided[0].strided if op.strided else 0] for op in reduced]
    return intervals.disjoint(array.span for array in arrays if isinstance(array, Buffer))


def _vote(joined: Sequence[Step], ordered: Sequence[Step], *, objects: bool) -> tuple[Step, ...]:
    """Return steps that run `joined` if no rank objects, else `ordered`."""
    leave = steps.end_round(1, 2)
    accepted = (leave, *joined, steps.jump(1 + len(ordered)))
    vote = (
        steps.free(),
        steps.enter(objects),
        steps.signal(1),
        steps.branch_if_flagged(len(accepted)),
    )
    return (*vote, *accepted, leave, *ordered)


def _in_order(lowered: Sequence[LoweredOp], gates: Gates) -> list[Program]:
    """Return each collective's program, between the awaited gates and its own."""
    programs = [op.build() for op in lowered]
    if not gates:
        return programs
    words = sum(program.users for program in programs)
    base = 0
    found = []
    for program, (number, waits, awaited) in zip(programs, gates, strict=True):
        # `concatenate` adds `base` to the numbers of this program's arrays, the gates' number too.
        before = [steps.gate(words - base, earlier) for earlier in waits]
        after = [steps.open_gate(words - base, number)] if awaited else []
        found.append(Program(program.call, (*before, *program.steps, *after), program.users))
        base += program.users
    return found


def _runs(lowered: Sequence[LoweredOp], shape: GroupShape) -> list[list[LoweredOp]]:
    """Cut a batch into runs: small all_reduces that fit a staging slot, or another operation."""
    runs: list[list[LoweredOp]] = []
    room = -1  # bytes left for another all_reduce in the last run
    for op in lowered:
        need = line_up(op.part[0]) if op.part else shape.slot_bytes + 1
        small = op.part is not None and op.part[0] <= all_reduce.one_shot_limit(shape)
        if small and need <= room:
            runs[-1].append(op)
            room -= need
        else:
            runs.append([op])
            room = shape.slot_bytes - need if small else -1
    return runs


def _joined(run: Sequence[LoweredOp], shape: GroupShape) -> Program:
    """Return a program for a run's operations, with a shared barrier."""
    if len(run) == 1:
        return run[0].build()
    parts: list[all_reduce.FusedArray] = []
    before: list[Step] = []
    after: list[Step] = []
    base = 0
    for op in run:
        assert op.part is not None
        parts.append(all_reduce.FusedArray(base, *op.part))
        before += packs(op.strided, base)
        after += unpacks(op.strided, base)
        base += len(op.arrays)
    whole = (*before, *all_reduce.fused(shape, parts), *after)
    return Program(run[0].build().call, whole, base)
