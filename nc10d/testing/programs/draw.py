"""Drawing programs: by hypothesis, which shrinks them, and from a random number generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from nc10d.testing.programs.mixed_program import (
    BARRIER,
    CALLS,
    DTYPES,
    MESSAGE,
    REDUCTIONS,
    MixedProgram,
    MixedStep,
)

Choose = Callable[[int, int], int]
"""Returns a number from the first to the second, both included."""
COUNTS = (1, 2, 3, 0, 17, 1000)
MOST_GROUPS = 2


def mixed_programs(
    size: int, longest: int = 6, blocks: bool = True
) -> st.SearchStrategy[MixedProgram]:
    """Draw programs for `size` ranks: collectives and messages, in sub-groups, blocks, and async.

    They shrink to few steps on few elements, and print as code.
    """
    # Groups and steps are drawn apart, and fitted afterwards: so each shrinks by itself.
    return st.builds(
        lambda groups, steps: _fitted(size, groups, steps, blocks),
        st.lists(_groups(size), max_size=MOST_GROUPS),
        st.lists(_steps(size), min_size=1, max_size=longest),
    )


@st.composite
def _groups(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    return _group(size, lambda low, high: draw(st.integers(low, high)))


@st.composite
def _steps(draw: st.DrawFn, size: int) -> MixedStep:
    return _step(size, lambda low, high: draw(st.integers(low, high)))


def random_program(size: int, seed: int, longest: int = 6, blocks: bool = False) -> MixedProgram:
    """Return a seed's program."""
    choose = random.Random(seed).randint
    groups = [_group(size, choose) for _ in range(choose(0, MOST_GROUPS))]
    steps = [_step(size, choose) for _ in range(choose(1, longest))]
    return _fitted(size, groups, steps, blocks)


def _group(size: int, choose: Choose) -> tuple[int, ...]:
    bits = choose(1, 2**size - 1)
    return tuple(rank for rank in range(size) if bits >> rank & 1)


def _step(size: int, choose: Choose) -> MixedStep:
    return MixedStep(
        CALLS[choose(0, len(CALLS) - 1)],
        DTYPES[choose(0, len(DTYPES) - 1)],
        COUNTS[choose(0, len(COUNTS) - 1)],
        REDUCTIONS[choose(0, len(REDUCTIONS) - 1)],
        choose(0, MOST_GROUPS),
        choose(0, size - 1),
        choose(0, size - 1),
        (None, 0, 1, 2)[choose(0, 3)],
        bool(choose(0, 1)),
    )


def _fitted(
    size: int, groups: Sequence[tuple[int, ...]], steps: Sequence[MixedStep], blocks: bool
) -> MixedProgram:
    return MixedProgram(size, tuple(groups), tuple(_fit(size, groups, s, blocks) for s in steps))


def _fit(size: int, groups: Sequence[tuple[int, ...]], step: MixedStep, blocks: bool) -> MixedStep:
    """Return a step whose group exists and has its root and its peer."""
    group = step.group if step.group <= len(groups) else 0
    many = len(groups[group - 1]) if group else size
    root, peer = step.root % many, step.peer % many
    call = BARRIER if step.call == MESSAGE and root == peer else step.call
    block = blocks and step.block and group == 0 and call != BARRIER
    open_for = None if block else step.open_for
    return replace(
        step, call=call, group=group, root=root, peer=peer, open_for=open_for, block=block
    )
