"""Turns measured times into a machine's constants. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.model.collective_programs import MAKERS
from benchmarks.model.machine import DEVELOPMENT, Curve, Machine
from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS, Thresholds

SHARE = 0.25
"""The quantile of repeated times that is used: other programs only ever add time."""
Sample = dict[tuple[str, int], float]
"""Seconds, by name and array size (0 where there is none)."""


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A collective to measure beside the constants; `far` if its two ranks share no host."""

    op: str
    nbytes: int
    far: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of a round of measurements: samples for the constants, and times of calls.

    `thresholds` are those of the machine's CPU (see cpu_policy.py).
    """

    sample: Sample
    times: dict[TimedCall, float]
    thresholds: Thresholds = DEFAULTS


def typical(times: Iterable[float], share: float = SHARE) -> float:
    """Return the quantile `share` of times: below the median, less load of others is in it."""
    found = sorted(times)
    return found[int(share * (len(found) - 1))]


def medians(samples: Sequence[Sample]) -> Sample:
    """Return the median of each sample."""
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


def machine_of(sample: Sample) -> Machine:
    """Turn measured times into constants; unmeasured constants are those of DEVELOPMENT."""

    def curve(name: str) -> Curve:
        found = {reach: seconds for (key, reach), seconds in sample.items() if key == name}
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
        written=curve("written"),
    )


def constants(rounds: Sequence[Round]) -> Machine:
    """Return a machine's constants: medians over rounds."""
    machine = machine_of(medians([round_.sample for round_ in rounds]))
    return replace(machine, thresholds=rounds[0].thresholds)
