"""What was measured, and what follows: times become a machine's constants. All of it is pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.model.cases import MAKERS
from benchmarks.model.machine import DEVELOPMENT, Curve, Machine
from nc10d.backend.cpu.algorithms.tuning import Boards

SHARE = 0.25
"""Of repeated times the quartile is taken: other programs only ever add to them."""
Sample = dict[tuple[str, int], float]
"""Seconds, by figure and array size (0 where there is none)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A collective to be measured beside the constants; `far` if its two ranks share no host."""

    op: str
    nbytes: int
    far: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What was measured one after another: figures for the constants, and cells, in seconds.

    `boards` says how quick boards are on the machine (see cpu_policy.py).
    """

    sample: Sample
    times: dict[Cell, float]
    boards: Boards = Boards.NORMAL


def typical(times: Iterable[float], share: float = SHARE) -> float:
    """Return the time that a share of all stay below: the median, or less of others' load."""
    found = sorted(times)
    return found[int(share * (len(found) - 1))]


def medians(samples: Sequence[Sample]) -> Sample:
    """Return the median of each figure."""
    return {key: statistics.median(found[key] for found in samples) for key in samples[0]}


def machine_of(sample: Sample) -> Machine:
    """Turn measured times into constants; what was not measured costs what it does elsewhere."""

    def curve(name: str) -> Curve:
        found = {reach: seconds for (what, reach), seconds in sample.items() if what == name}
        return tuple((reach, max(0.0, found[reach])) for reach in sorted(found))

    ways = {op: sample[f"call {op}", 0] for op in MAKERS}
    return Machine(
        calls=ways,
        step=max(0.0, sample["step", 0]),
        wait=sample["wait", 0],
        hop=sample.get(("hop", 0), DEVELOPMENT.hop),
        send=sample.get(("send", 0), DEVELOPMENT.send),
        put=curve("put"),
        get=curve("get"),
        fold=curve("fold"),
        copy=curve("copy"),
        stream=curve("stream") or DEVELOPMENT.stream,
        one_way=curve("one_way"),
        shared=curve("shared"),
        unread=curve("unread"),
        rooted=curve("rooted"),
        also=curve("also"),
        third=curve("third"),
        pair=curve("pair"),
        kernel=curve("kernel"),
        fill=curve("fill"),
        lent=curve("lent"),
    )


def constants(rounds: Sequence[Round]) -> Machine:
    """Return a machine's constants: medians over rounds."""
    machine = machine_of(medians([one.sample for one in rounds]))
    return replace(machine, boards=min(one.boards for one in rounds))
