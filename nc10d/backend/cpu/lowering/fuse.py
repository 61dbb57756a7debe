"""Several collectives as one program: one after another, small all_reduces with one handshake.

A handshake for several needs their arrays apart, and nobody waiting in between. Whether that is so
each rank knows of its own arrays only. So a batch that could share handshakes begins with a
meeting, where a rank that can't says so; then all take the other way, an operation at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from nc10d.arrays import intervals
from nc10d.arrays.buffer import Buffer
from nc10d.backend.cpu.algorithms import all_reduce
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.lowering.lower import LoweredOp
from nc10d.backend.cpu.lowering.ordering import BatchDependencies
from nc10d.backend.cpu.lowering.strided import packs, unpacks
from nc10d.backend.cpu.program.lines import line_up
from nc10d.backend.cpu.program.program import CallInfo, Program, Step, concatenate
from nc10d.backend.cpu.program.steps import (
    branch_if_flagged,
    end_round,
    enter,
    free,
    gate,
    jump,
    open_gate,
    signal,
)

Fences = tuple[tuple[int, tuple[int, ...], bool], ...]
"""For each collective its number in the batch, the gates it waits for, and whether it has one."""


def fuse(
    requests: Sequence[LoweredOp],
    layout: GroupShape,
    gates: BatchDependencies | None,
    numbers: Sequence[int],
) -> LoweredOp:
    """Join collectives into one program, which does them in order.

    `numbers` are their places among all operations of the batch, by which `gates` knows them.
    """
    fences = _fences(gates, numbers)
    runs = _runs(requests, layout)
    apart = gates is None and _apart(requests)
    arrays: list[Buffer | npt.NDArray[Any]] = []
    outs: list[int] = []
    for r in requests:
        outs += [len(arrays) + i for i in r.outs]
        arrays += r.arrays
    if gates is not None:
        arrays.append(gates.words)

    def build() -> Program:
        call = _call(requests)
        ordered = concatenate(call, _fenced(requests, fences))
        steps = ordered.steps
        # Across hosts nobody asks the others' ranks: one after another is right whatever they hold.
        if len(runs) < len(requests) and layout.size > 1 and layout.hosts is None:
            joined = concatenate(call, [_joined(run, layout) for run in runs]).steps
            steps = _either(joined, steps, flag=not apart)
        return Program(call, steps, len(arrays))

    key = ("batch", apart, fences, *(r.key for r in requests))
    return LoweredOp(key, arrays, tuple(outs), build)


def _fences(gates: BatchDependencies | None, numbers: Sequence[int]) -> Fences:
    if gates is None:
        return ()
    mine = [gates.fences[number] for number in numbers]
    return tuple((fence.own, tuple(fence.waits), fence.awaited) for fence in mine)


def _call(requests: Sequence[LoweredOp]) -> CallInfo:
    calls = [r.build().call for r in requests]
    if len(calls) == 1:
        return calls[0]
    names = "\n".join(map(repr, calls))
    digest = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
    detail = f"{calls[0].describe()} and {len(requests) - 1} more, {digest}"
    return CallInfo("coalesced", count=len(requests), detail=detail)


def _apart(requests: Sequence[LoweredOp]) -> bool:
    """Say whether no two arrays of all_reduces overlap: if they do, one must end before another."""
    return intervals.disjoint(_span(r) for r in requests if r.part)


def _span(request: LoweredOp) -> tuple[int, int]:
    number = request.folds[0].strided if request.folds else 0
    buffer = request.arrays[number]
    assert isinstance(buffer, Buffer)
    return buffer.span


def _either(joined: Sequence[Step], ordered: Sequence[Step], *, flag: bool) -> tuple[Step, ...]:
    """The one way if nobody minds, else the other."""
    leave = end_round(1, 2)
    first = (leave, *joined, jump(1 + len(ordered)))
    return (free(), enter(flag), signal(1), branch_if_flagged(len(first)), *first, leave, *ordered)


def _fenced(requests: Sequence[LoweredOp], fences: Fences) -> list[Program]:
    """Each collective by itself, between the gates that it waits for and its own."""
    programs = [r.build() for r in requests]
    if not fences:
        return programs
    words = sum(program.users for program in programs)
    base = 0
    found = []
    for program, (own, waits, awaited) in zip(programs, fences, strict=True):
        # Joining the programs will number each one's arrays from `base` on.
        before = [gate(words - base, number) for number in waits]
        after = [open_gate(words - base, own)] if awaited else []
        found.append(Program(program.call, (*before, *program.steps, *after), program.users))
        base += program.users
    return found


def _runs(requests: Sequence[LoweredOp], layout: GroupShape) -> list[list[LoweredOp]]:
    """Cut a batch into runs: small all_reduces that fit one half together, or one other each."""
    runs: list[list[LoweredOp]] = []
    room = -1  # bytes left for another all_reduce in the last run
    for r in requests:
        need = line_up(r.part[0]) if r.part else layout.staging + 1
        small = r.part is not None and r.part[0] <= all_reduce.one_shot_limit(layout)
        if small and need <= room:
            runs[-1].append(r)
            room -= need
        else:
            runs.append([r])
            room = layout.staging - need if small else -1
    return runs


def _joined(run: Sequence[LoweredOp], layout: GroupShape) -> Program:
    """Small all_reduces with one handshake."""
    if len(run) == 1:
        return run[0].build()
    parts: list[all_reduce.Part] = []
    before: list[Step] = []
    after: list[Step] = []
    base = 0
    for r in run:
        assert r.part is not None
        parts.append(all_reduce.Part(base, *r.part))
        before += packs(r.folds, base)
        after += unpacks(r.folds, base)
        base += len(r.arrays)
    steps = (*before, *all_reduce.fused(layout, parts), *after)
    return Program(run[0].build().call, steps, base)
