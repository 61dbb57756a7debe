"""A program of collectives and messages that is data: it prints as code, and knows the results.

The code is what runs, so a failing program can be pasted into a file. It uses names that nc10d and
torch.distributed share: `run` takes the library, and the array maker.

    program = MixedProgram(2, (), (MixedStep("all_reduce", "int32", 3),))
    print(program)                      # def program(rank): ...
    run_ranks(lambda group: program.run(group.rank), 2)

All ranks take the steps in the same order, so no program can block. Elements are small whole
numbers, so that every library must compute the same bits.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.ops import ReduceOp
from nc10d.ops.reductions import kind_named
from nc10d.testing import reference

Array = np.ndarray[Any, np.dtype[Any]]
MESSAGE, BARRIER = "message", "barrier"
REDUCTIONS = ("SUM", "MAX", "MIN", "PRODUCT")
DTYPES = ("int32", "float32", "float64", "int64", "uint8")


@dataclass(frozen=True)
class MixedStep:
    """A call by all members of a group, or a message between two members.

    `group` is 0 for the whole job, else 1 + the index of a sub-group. `root` and `peer` are places
    in the group: of the root, or of sender and receiver. With `open_for` the call is asynchronous,
    and is waited for after so many later steps. Steps in the same `block`, one after the other,
    form a coalescing block.
    """

    call: str
    dtype: str = "int32"
    count: int = 1
    op: str = "SUM"
    group: int = 0
    root: int = 0
    peer: int = 0
    open_for: int | None = None
    block: bool = False


@dataclass(frozen=True)
class MixedProgram:
    """Steps on `size` ranks; `groups` are lists of ranks in ascending order."""

    size: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[MixedStep, ...]

    def members(self, step: MixedStep) -> Sequence[int]:
        """Return the ranks that take a step's call."""
        return self.groups[step.group - 1] if step.group else range(self.size)

    def code(self, name: str = "program") -> str:
        """Return a rank's function, which returns each step's results (or None)."""
        body = "\n".join(_lines(self))
        return f"def {name}(rank):\n{textwrap.indent(body, '    ')}\n"

    def __str__(self) -> str:
        return f"import numpy as np\nimport nc10d as dist\n\n\n{self.code()}"

    def __repr__(self) -> str:
        return f"MixedProgram({self.size}, {self.groups}, {self.steps})\n# As code:\n{self}"

    def run(self, rank: int, dist: Any = None, np: Any = np) -> list[Any]:
        """Run as a rank in the default group of `dist`, by default nc10d; return the results.

        `np` makes arrays by `arange` and `zeros`.
        """
        if dist is None:
            import nc10d as dist
        names: dict[str, Any] = {"dist": dist, "np": np}
        exec(compile(self.code(), "<a program>", "exec"), names)
        found: list[Any] = names["program"](int(rank))
        return found

    def expected(self) -> list[list[Array | None]]:
        """Return each rank's results."""
        columns = [_expected(self, step) for step in self.steps]
        return [[column.get(rank) for column in columns] for rank in range(self.size)]


# As code


def _lines(program: MixedProgram) -> Iterator[str]:
    for number, ranks in enumerate(program.groups, 1):
        yield f"group{number} = dist.new_group({[*ranks]})"
    names = ", ".join(f"y{place}" for place in range(len(program.steps)))
    if program.steps:
        yield f"{names.replace(', ', ' = ')} = None"
    due: dict[int, list[int]] = {}
    in_block = False
    for place, step in enumerate(program.steps):
        if step.block and not in_block:
            yield "with dist.coalescing_manager():"
        in_block = step.block
        for line in (*_waits(program, due.pop(place, [])), *_step(program, step, place)):
            yield f"    {line}" if in_block else line
        if step.open_for is not None:
            due.setdefault(place + 1 + step.open_for, []).append(place)
    for place in sorted(due):
        yield from _waits(program, due[place])
    yield f"return [{names}]"


def _waits(program: MixedProgram, places: Sequence[int]) -> Iterator[str]:
    for place in places:
        yield from _guarded(program, program.steps[place], [f"w{place}.wait()"])


def _guarded(program: MixedProgram, step: MixedStep, lines: Sequence[str]) -> Iterator[str]:
    """Yield lines for the ranks that take part."""
    ranks = [*program.members(step)]
    if step.call == MESSAGE:
        ranks = sorted({ranks[step.root], ranks[step.peer]})
    if len(ranks) < program.size and lines:
        yield f"if rank in {tuple(ranks)}:"
        yield from (f"    {line}" for line in lines)
    else:
        yield from lines


def _step(program: MixedProgram, step: MixedStep, place: int) -> Iterator[str]:
    """Yield the lines that make a step's arrays, and its call."""
    members = program.members(step)
    yield from _guarded(program, step, [*_LINES.get(step.call, _flat)(members, step, place)])


def _barrier(_: Sequence[int], step: MixedStep, place: int) -> Iterator[str]:
    yield _call(step, place, "")


def _in_place(members: Sequence[int], step: MixedStep, place: int) -> Iterator[str]:
    root, op = members[step.root], f", op=dist.ReduceOp.{step.op}"
    arguments = {"all_reduce": op, "reduce": f", dst={root}{op}", "broadcast": f", src={root}"}
    yield f"y{place} = {_values(step.count, step)}"
    yield _call(step, place, f"y{place}{arguments[step.call]}")


def _gather(members: Sequence[int], step: MixedStep, place: int) -> Iterator[str]:
    root, many = members[step.root], len(members)
    parts = f"[{_zeros(step.count, step)} for _ in range({many})] if rank == {root} else None"
    yield f"x{place} = {_values(step.count, step)}"
    yield f"y{place} = {parts}"
    yield _call(step, place, f"x{place}, y{place}, dst={root}")


def _scatter(members: Sequence[int], step: MixedStep, place: int) -> Iterator[str]:
    root, many = members[step.root], len(members)
    parts = f"[{_values(step.count, step, 'i')} for i in range({many})] if rank == {root} else None"
    yield f"y{place} = {_zeros(step.count, step)}"
    yield f"x{place} = {parts}"
    yield _call(step, place, f"y{place}, x{place}, src={root}")


def _flat(members: Sequence[int], step: MixedStep, place: int) -> Iterator[str]:
    many = len(members)
    sent = step.count * (many if step.call in _OF_CHUNKS else 1)
    received = step.count * (1 if step.call == "reduce_scatter_tensor" else many)
    op = f", op=dist.ReduceOp.{step.op}" if step.call == "reduce_scatter_tensor" else ""
    yield f"x{place}, y{place} = {_values(sent, step)}, {_zeros(received, step)}"
    yield _call(step, place, f"y{place}, x{place}{op}")


def _message(members: Sequence[int], step: MixedStep, place: int) -> Iterator[str]:
    src, dst = members[step.root], members[step.peer]
    started, i = ("", "") if step.open_for is None else (f"w{place} = ", "i")
    tail = f"tag={place}{_group(step)})"
    yield f"x{place}, y{place} = {_values(step.count, step)}, {_zeros(step.count, step)}"
    yield f"if rank == {src}:"
    yield f"    {started}dist.{i}send(x{place}, {dst}, {tail}"
    yield "else:"
    yield f"    {started}dist.{i}recv(y{place}, {src}, {tail}"


_LINES: dict[str, Callable[[Sequence[int], MixedStep, int], Iterator[str]]] = {
    "all_reduce": _in_place,
    "reduce": _in_place,
    "broadcast": _in_place,
    "gather": _gather,
    "scatter": _scatter,
    MESSAGE: _message,
    BARRIER: _barrier,
}


def _call(step: MixedStep, place: int, arguments: str) -> str:
    started, last = ("", "") if step.open_for is None else (f"w{place} = ", ", async_op=True")
    inside = f"{arguments}{_group(step)}{last}".removeprefix(", ")
    return f"{started}dist.{step.call}({inside})"


def _group(step: MixedStep) -> str:
    return f", group=group{step.group}" if step.group else ""


def _values(count: int, step: MixedStep, rank: str = "rank") -> str:
    return f'np.arange({count}, dtype="{step.dtype}") + {rank} + 1'


def _zeros(count: int, step: MixedStep) -> str:
    return f'np.zeros({count}, dtype="{step.dtype}")'


# The results


_OF_CHUNKS = frozenset({"reduce_scatter_tensor", "all_to_all_single"})


def _expected(program: MixedProgram, step: MixedStep) -> dict[int, Any]:
    """Return a step's results by rank; a rank without a result is left out."""
    if step.call == BARRIER:
        return {}
    members, n = [*program.members(step)], step.count
    count = n * (len(members) if step.call in _OF_CHUNKS else 1)
    inputs = [np.arange(count, dtype=step.dtype) + step_dtype(step, rank + 1) for rank in members]
    if step.call == MESSAGE:
        empty = np.zeros(n, step.dtype)
        src, dst = members[step.root], members[step.peer]
        return {src: empty, dst: inputs[step.root]}
    return dict(_ORACLE[step.call](members, inputs, step))


def step_dtype(step: MixedStep, value: int) -> Any:
    """Return a number in the step's dtype."""
    return np.dtype(step.dtype).type(value)


def _reduction(step: MixedStep) -> ReduceOp:
    return ReduceOp(kind_named(step.op))


def _chunks(inputs: Sequence[Array], step: MixedStep) -> list[list[Array]]:
    return [[*np.split(x, len(inputs))] for x in inputs]


def _scattered(members: Sequence[int], _: object, step: MixedStep) -> Iterator[tuple[int, object]]:
    for place, rank in enumerate(members):
        yield rank, np.arange(step.count, dtype=step.dtype) + step_dtype(step, place + 1)


_ORACLE: dict[str, Callable[[Sequence[int], Any, MixedStep], Any]] = {
    "all_reduce": lambda m, x, s: zip(m, reference.all_reduce(x, _reduction(s)), strict=True),
    "reduce": lambda m, x, s: [(m[s.root], reference.fold(x, _reduction(s)))],
    "broadcast": lambda m, x, s: [(rank, x[s.root]) for rank in m],
    "all_gather_into_tensor": lambda m, x, s: [(rank, np.concatenate(x)) for rank in m],
    "reduce_scatter_tensor": lambda m, x, s: zip(
        m, reference.reduce_scatter(_chunks(x, s), _reduction(s)), strict=True
    ),
    "all_to_all_single": lambda m, x, s: zip(
        m, map(np.concatenate, reference.all_to_all(_chunks(x, s))), strict=True
    ),
    "gather": lambda m, x, s: [(m[s.root], x)],
    "scatter": _scattered,
}
CALLS = (*_ORACLE, MESSAGE, BARRIER)


def complaints(program: MixedProgram, answers: Mapping[int, Sequence[object]]) -> list[str]:
    """Return a text for each rank's result that is not the expected result."""
    from nc10d.testing.asserts import difference

    found, expected = [], program.expected()
    for rank, got in answers.items():
        for place, want in enumerate(expected[rank]):
            if want is None:  # nothing is promised here
                continue
            mine = got[place]
            if isinstance(want, list):
                mine, want = np.concatenate(mine), np.concatenate(want)
            text = difference(np.asarray(mine), np.asarray(want))
            if text:
                found.append(f"rank {rank}, y{place} ({program.steps[place].call}): {text}")
    return found
