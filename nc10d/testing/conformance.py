"""`check_backend`: every backend's contract, checked bit for bit against the reference.

    check_backend("cpu")                                # by its name
    check_backend(make_mine, world_sizes=(1, 2))        # or by its factory

The check runs (a) a pairwise cover of call x dtype x reduction x world size x shape and layout x
mode, (b) every reduction with every dtype, which must be right or raise the TypeError of
`nc10d.arrays.dtypes.check_reduce`, and (c) the requirements in `nc10d.testing.requirements`:
messages, barriers, groups, abort. A backend may lack scan and exscan: all ranks then raise a
TypeError. Ranks are threads or processes, and live from case to case. Results, unchanged inputs and
the bytes beside and between the elements are compared.

`cover` returns the cases and `complaints` runs a single case, for suites with their own loop.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nc10d import ops as O
from nc10d.arrays.dtypes import DType
from nc10d.backend.protocol import Factory
from nc10d.backend.registry import register_backend, unregister_backend
from nc10d.group.process_group import ProcessGroup
from nc10d.ops.facts import FACTS
from nc10d.testing import reference
from nc10d.testing.cases import OPS, CollectiveCase, allowed, cover, reduction
from nc10d.testing.hosts.external_ranks import Launcher, rank_of
from nc10d.testing.layouts import intact
from nc10d.testing.modes import perform
from nc10d.testing.ranks import Kind, Ranks
from nc10d.testing.requirements import REQUIREMENTS
from nc10d.testing.strategies import CollectiveCall, mixed_values, outputs

Array = np.ndarray[Any, np.dtype[Any]]
MOST_FAILURES = 10

__all__ = ["CollectiveCase", "check_backend", "complaints", "cover"]


# Running cases


def _itself(group: ProcessGroup) -> ProcessGroup:
    return group


def complaints(
    ranks: Ranks, case: CollectiveCase, make: Callable[[ProcessGroup], object] = _itself
) -> list[str]:
    """Run a case on `ranks`; return a text for each fault, an empty list if there is none.

    The calls are those of `make(group)`.
    """
    call = case.build()
    row = [[value] * case.size for value in (call, case.mode, make)]
    if FACTS[call.kind].optional and all(ranks.run(_is_refused, row[0])):
        return []
    answers = ranks.run(_run_case, *row)
    found = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(answers) for text in texts]
    for rank, wanted in enumerate(call.expected()):
        for turn, got in enumerate(answers[rank][0]):
            for index, (result, right) in enumerate(zip(got, wanted, strict=True)):
                if not reference.same_bits(result, right):
                    where = f"rank {rank}, turn {turn}, array {index}"
                    found.append(f"{where}: {_difference(result, right)}")
    return found


def _run_case(
    group: ProcessGroup, call: CollectiveCall, mode: str, make: Callable[[ProcessGroup], Any]
) -> tuple[list[list[Array]], list[str]]:
    """Return each turn's outputs, and texts about memory that must not have changed."""
    ops = perform(make(group), lambda: call.make(group.rank), mode)
    fresh = call.make(group.rank)
    texts = []
    for op in ops:
        if not all(intact(x) for x in [*outputs(op), *_inputs_of(op)]):
            texts.append("wrote beside the elements of an array")
        if not all(map(reference.same_bits, _inputs_of(op), _inputs_of(fresh))):
            texts.append("changed its input")
    return [outputs(op) for op in ops], texts


def _inputs_of(op: object) -> list[Array]:
    found = getattr(op, "inp", None)
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [found]


def _difference(mine: Array, right: Array) -> str:
    if (mine.dtype, mine.shape) != (right.dtype, right.shape):
        return f"{mine.dtype} {mine.shape} instead of {right.dtype} {right.shape}"
    pairs = zip(np.ravel(mine), np.ravel(right), strict=True)
    wrong = [
        (i, a, b)
        for i, (a, b) in enumerate(pairs)
        if not reference.same_bits(np.array(a), np.array(b))
    ]
    index, got, wanted = wrong[0]
    return f"{len(wrong)} of {mine.size} elements, first [{index}]: {got!r}, must be {wanted!r}"


# Every reduction with a dtype


def reduction_complaints(ranks: Ranks, dtype: DType) -> list[str]:
    """Try every reduction with `dtype` in three calls; return a text for each fault."""
    answers = ranks.run(_run_reductions, [dtype] * ranks.world_size)
    found = []
    for index, (name, call) in enumerate(_reductions(dtype, ranks.world_size)):
        wanted = call.expected() if allowed(dtype, name) else None
        for rank, answer in enumerate(answers):
            text = _check_reduction(answer[index], wanted[rank][0] if wanted else None)
            if text:
                found.append(f"{name} by {call.kind.__name__}, rank {rank}: {text}")
    return found


def _check_reduction(answer: Any, wanted: Array | None) -> str:
    """Return the fault in a reduction's result or error; without `wanted`, it must be refused."""
    if wanted is None:
        return "" if answer == "TypeError" else "must be refused with a TypeError"
    if isinstance(answer, str):
        return f"raised a {answer}"
    return "" if reference.same_bits(answer, wanted) else _difference(answer, wanted)


def _reductions(dtype: DType, size: int) -> Iterator[tuple[str, CollectiveCall]]:
    rows = [[mixed_values(dtype, 37, size * r + c) for c in range(size)] for r in range(size)]
    first = [row[0] for row in rows]
    for name in OPS[:-1]:
        op = reduction(name, dtype)
        yield name, CollectiveCall(O.AllReduce, first, op)
        yield name, CollectiveCall(O.Reduce, first, op, size - 1)
        yield name, CollectiveCall(O.ReduceScatter, rows, op, flat=True)


def _run_reductions(group: ProcessGroup, dtype: DType) -> list[Any]:
    """Return each call's result, "TypeError" for a call that was refused."""
    return [_attempt(group, call) for _, call in _reductions(dtype, group.size)]


def _is_refused(group: ProcessGroup, call: CollectiveCall) -> bool:
    return isinstance(_attempt(group, call), str)


def _attempt(group: ProcessGroup, call: CollectiveCall) -> object:
    try:
        (op,) = perform(group, lambda: call.make(group.rank), "once")
    except TypeError:
        return "TypeError"
    return outputs(op)[0]


# All checks


def check_backend(
    make: str | Factory,
    world_sizes: Sequence[int] = (1, 2, 3, 4, 5),
    kind: Kind | Launcher = "threads",
    *,
    dtypes: Sequence[DType] = tuple(DType),
    timeout: float = 20.0,
    seed: int = 0,
) -> int:
    """Check a backend; return the number of checks. AssertionError names the failed ones.

    `make` is a backend's name or its factory (with kind="processes" one that pickles). A `kind` may
    be a Launcher, for ranks that mpirun or the like must start. `timeout` in seconds is that of the
    groups. After ten failed cases the rest is not run.
    """
    failures: list[str] = []
    count = 0
    make_ranks = kind.ranks if isinstance(kind, Launcher) else functools.partial(Ranks, kind=kind)
    with _registered(make) as name:
        cases = cover(world_sizes, dtypes, seed)
        for size in world_sizes:
            with make_ranks(size, backend=name, timeout=timeout) as ranks:
                ranks.run(rank_of)  # a group that can't form is not a case's fault
                for title, check in _checks(size, [c for c in cases if c.size == size], dtypes):
                    if len(failures) >= MOST_FAILURES:
                        break
                    count += 1
                    failures += _complaint(title, lambda check=check: check(ranks))  # type: ignore[misc]
    if failures:
        raise AssertionError(f"{len(failures)} of {count} checks failed:\n" + "\n".join(failures))
    return count


Check = Callable[[Ranks], Sequence[str]]


def _checks(
    size: int, cases: Sequence[CollectiveCase], dtypes: Sequence[DType]
) -> Iterator[tuple[str, Check]]:
    for dtype in dtypes:
        title = f"reductions of {dtype.label}, {size} ranks"
        yield title, functools.partial(reduction_complaints, dtype=dtype)
    for case in cases:
        yield str(case), functools.partial(complaints, case=case)
    for requirement in REQUIREMENTS:
        title = f"{requirement.__name__.replace('_', ' ')}, {size} ranks"
        yield title, functools.partial(_requirement_complaints, requirement=requirement)


def _requirement_complaints(ranks: Ranks, requirement: Callable[[ProcessGroup], None]) -> list[str]:
    ranks.run(requirement)
    return []


def _complaint(title: str, check: Callable[[], Sequence[str]]) -> list[str]:
    """Return a text about a failed check, or nothing; a raised error is a failure."""
    try:
        found = list(check())
    except Exception as error:  # noqa: BLE001  (a backend may fail in any way)
        found = [f"{type(error).__name__}: {error}"]
    return ["\n  ".join([title, *found[:5]])] if found else []


class _PortableName(str):
    """A backend's name that registers its factory wherever it is unpickled."""

    factory: Factory

    def __reduce__(self) -> tuple[Any, ...]:
        return _register_again, (str(self), self.factory)


def _register_again(name: str, factory: Factory) -> str:
    register_backend(name, factory)
    return name


_numbers = itertools.count(1)


@contextlib.contextmanager
def _registered(make: str | Factory) -> Iterator[str]:
    if isinstance(make, str):
        yield make
        return
    name = _PortableName(f"under-test-{next(_numbers)}")
    name.factory = make
    register_backend(name, make)
    try:
        yield name
    finally:
        unregister_backend(name)
