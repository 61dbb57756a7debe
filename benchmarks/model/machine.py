"""The constants of the cost model for a machine, and the price of a step.

Latencies are seconds, rates are seconds a byte. A rate depends on the call's memory (`reach`, bytes
of a rank's arrays): bytes in a cache are moved several times as fast. `survey` in calibrate.py
measures the constants; `DEVELOPMENT` has those of the development machine.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS, Thresholds
from nc10d.backend.cpu.engine.cpu_policy import FAST_STAGING
from nc10d.backend.cpu.native.offsets import READS, WRITES
from nc10d.backend.cpu.program.program import SHARED, At, Space, Step, StepKind

Curve = tuple[tuple[int, float], ...]
"""(reach in bytes, seconds a byte), by increasing reach; log-linear between, flat outside."""
PUTTING = StepKind.COPY, StepKind.APPLY, StepKind.FOLD_STAGED
"""Steps that may put bytes into a staging buffer."""


def at_reach(curve: Curve, reach: float) -> float:
    """Return a rate for calls with `reach` bytes of arrays a rank."""
    if len(curve) == 1 or reach <= curve[0][0]:
        return curve[0][1]
    if reach >= curve[-1][0]:
        return curve[-1][1]
    above = bisect_left(curve, (math.ceil(reach), 0.0))
    (low, slow), (high, fast) = curve[above - 1], curve[above]
    share = math.log(reach / low) / math.log(high / low)
    return slow + share * (fast - slow)


@dataclass(frozen=True)
class Machine:
    """Constants of a kind of machine and network; every rank has a separate core.

    The latencies: `calls` is the time of a call in Python, by operation. `wait` is from a signal to
    the moment when a waiting peer continues. `hop` is from the departure of the last byte to its
    arrival on another host. `send` is the work of a transfer to or from another host, beside its
    bytes.

    The curves are seconds a byte. An empty curve means the default in parentheses.

    | curve | bytes |
    |---|---|
    | `put` | put into the rank's staging buffer |
    | `get` | got from a peer's staging buffer |
    | `fold` | folded from a peer's staging buffer |
    | `copy` | copied between the rank's arrays |
    | `stream` | sent through a host's network, in both directions at once |
    | `one_way` | sent in a single direction (`stream`) |
    | `shared` | sent through a network that all hosts share, such as a switch (no cost) |
    | `unread` | got into an array that the program does not read (`get`) |
    | `rooted` | got by a rank that puts nothing (`get`) |
    | `also` | put into the staging buffer while they are folded (the quickest copy) |
    | `third` | folded from a peer's and the rank's array into a third array (`fold`) |
    | `pair` | folded from two of the rank's arrays (`copy`) |
    | `kernel` | copied by the kernel from a peer's array (the kernel can't) |
    | `fill` | copied by the kernel into a peer's exposed array (the kernel can't) |
    | `written` | folded and written back into a peer's exposed array (the kernel can't) |

    Bytes that the kernel has copied are folded at the price of a copy. Ranks choose
    algorithms by the `thresholds` of their CPU (see cpu_policy.py).
    """

    calls: Mapping[str, float]
    step: float
    wait: float
    hop: float
    send: float
    put: Curve
    get: Curve
    fold: Curve
    copy: Curve
    stream: Curve
    one_way: Curve = ()
    shared: Curve = ()
    unread: Curve = ()
    rooted: Curve = ()
    also: Curve = ()
    third: Curve = ()
    pair: Curve = ()
    kernel: Curve = ()
    fill: Curve = ()
    written: Curve = ()
    thresholds: Thresholds = DEFAULTS

    @property
    def access(self) -> int:
        """The kernel's access to a peer's memory: 0, READS or WRITES."""
        return WRITES if self.written else READS if self.kernel else 0

    def call(self, op: str) -> float:
        """Return the seconds of a call before and after its program."""
        return self.calls.get(op) or max(self.calls.values(), default=0.0)

    def sent(self, nbytes: int, reach: float, *, both_ways: bool) -> float:
        """Return the seconds of `nbytes` in a host's network."""
        curve = self.stream if both_ways or not self.one_way else self.one_way
        return nbytes * at_reach(curve, reach)

    def price(
        self, step: Step, nbytes: int, rank: int, size: int, reach: float, uses: Uses
    ) -> float:
        """Return the seconds of a step over `nbytes` on a rank of a host with `size` ranks.

        `uses` is that of the step's program. Waits and transfers between hosts have no price: see
        timed_walk.py.
        """
        if self.rooted and not uses.puts and step.kind is StepKind.COPY and _fetched(step, rank):
            return self.step + nbytes * at_reach(self.rooted, max(reach, nbytes))
        # A long step needs less time a byte than a short step. Rates of staged bytes were measured
        # with steps over a third of their reach, rates of arrays read in place over a half.
        parts = 2 if step.kind in (StepKind.FETCH, StepKind.FOLD_EXPOSED) else 3
        return self.step + nbytes * self._rate(step, rank, size, max(reach, parts * nbytes), uses)

    def _rate(self, step: Step, rank: int, size: int, reach: float, uses: Uses) -> float:
        if step.kind in (StepKind.COPY, StepKind.APPLY):
            return at_reach(self._copying(step, rank, uses), reach)
        if step.kind is StepKind.FOLD_STAGED:
            # Staged bytes are folded in the first cache, and copied as with `also`.
            copies = (step.dst.space in SHARED) + (step.also.space is not Space.NONE)
            apart = self.third and uses.only_writes(step.dst)
            first = at_reach(self.third if apart else self.fold, reach)
            rest = (size - 2) * at_reach(self.fold, reach)
            return first + rest + copies * self._also(reach)
        if step.kind is StepKind.PAIR:
            return at_reach(self.pair or self.copy, reach)
        if step.kind is StepKind.FETCH:
            return at_reach(self.kernel or self.get, reach)
        if step.kind is StepKind.FILL_EXPOSED:
            return at_reach(self.fill or self.kernel or self.get, reach)
        if step.kind is StepKind.FOLD_EXPOSED:
            fetched = at_reach(self.kernel or self.get, reach)
            folded = fetched + at_reach(self.copy, reach)
            writes = step.writable and self.access == WRITES
            return (size - 1) * (at_reach(self.written, reach) if writes else folded)
        return 0.0

    def _also(self, reach: float) -> float:
        # The result of a fold lies in the first cache.
        return at_reach(self.also, reach) if self.also else min(rate for _, rate in self.copy)

    def _copying(self, step: Step, rank: int, uses: Uses) -> Curve:
        if _fetched(step, rank):
            return self.unread if self.unread and uses.only_writes(step.dst) else self.get
        return self.put if step.dst.space in SHARED else self.copy


@dataclass(frozen=True, slots=True)
class Uses:
    """The user arrays that a program reads, and whether it puts bytes into a staging buffer."""

    read: frozenset[int]
    puts: bool

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Uses:
        """Look through a program's steps."""
        sources = [
            at for step in steps if step.kind is not StepKind.EXPOSE for at in (step.src, step.own)
        ]
        places = [at for step in steps if step.kind in PUTTING for at in (step.dst, step.also)]
        return cls(
            frozenset(at.index for at in sources if at.space is Space.USER),
            any(at.space in SHARED for at in places),
        )

    def only_writes(self, at: At) -> bool:
        """Return whether a place is in a user array that the program does not read."""
        return at.space is Space.USER and at.index not in self.read


def _fetched(step: Step, rank: int) -> bool:
    """Return whether a step reads a peer's staging buffer."""
    return step.src.space in SHARED and step.src.index != rank


def save(machine: Machine, path: Path) -> None:
    """Write constants as JSON."""
    path.write_text(json.dumps(asdict(machine), indent=1) + "\n")


def load(path: Path) -> Machine:
    """Read constants that `save` has written; ValueError for other contents."""
    try:
        found = json.loads(path.read_text())
        found.setdefault("written", found.pop("lent", ()))  # the name in files of older versions
        grades = [found.pop(name, 0) for name in ("quick", "boards")]  # in files of older versions
        older = FAST_STAGING if any(grades) else DEFAULTS
        limits = Thresholds(**found.pop("thresholds", asdict(older)))
        found = {**dict.fromkeys(LATER, ()), **found}
        curves = {name: _curve(found[name]) for name in CURVES}
        return Machine(**{**found, **curves, "thresholds": limits})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the constants of a machine: {error!r}") from error


def _curve(knots: list[list[float]]) -> Curve:
    return tuple((int(reach), float(rate)) for reach, rate in knots)


LATER = (
    "one_way",
    "shared",
    "unread",
    "rooted",
    "also",
    "third",
    "pair",
    "kernel",
    "fill",
    "written",
)
"""Curves that may be missing, as in files of older versions."""
CURVES = ("put", "get", "fold", "copy", "stream", *LATER)


def changed(machine: Machine, setting: str) -> Machine:
    """Return a machine with a constant changed to NAME=SECONDS; a curve becomes flat.

    ValueError if there is no such constant or it is not a number of at least 0.
    """
    name, _, text = setting.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    names = [field.name for field in fields(Machine) if field.name not in ("calls", "thresholds")]
    if name not in (*names, "call") or not 0 <= value < math.inf:
        raise ValueError(f"{setting!r} is not NAME=SECONDS with a NAME of call, {', '.join(names)}")
    if name == "call":
        return replace(machine, calls={"": value})
    given: Any = ((1, value),) if name in CURVES else value
    if name == "stream":
        return replace(machine, stream=given, one_way=())
    return replace(machine, **{name: given})


def _nano(*knots: tuple[int, float]) -> Curve:
    """Return a curve from bytes and nanoseconds a byte."""
    return tuple((reach, rate * 1e-9) for reach, rate in knots)


DEVELOPMENT = Machine(
    calls={
        "all_reduce": 6.9e-07,
        "reduce": 7.8e-07,
        "broadcast": 6.9e-07,
        "all_gather": 7e-07,
        "reduce_scatter": 6.8e-07,
        "all_to_all": 7.2e-07,
        "barrier": 6.6e-07,
    },
    step=3e-09,
    wait=1.8e-07,
    hop=1.6e-06,
    send=1.6e-06,
    put=_nano(
        (512, 0.15),
        (2 << 10, 0.027),
        (8 << 10, 0.028),
        (32 << 10, 0.0039),
        (128 << 10, 0.027),
        (512 << 10, 0.025),
        (1 << 20, 0.023),
        (2 << 20, 0.04),
        (8 << 20, 0.043),
        (32 << 20, 0.061),
    ),
    get=_nano(
        (512, 0.36),
        (2 << 10, 0.41),
        (8 << 10, 0.29),
        (32 << 10, 0.23),
        (128 << 10, 0.14),
        (512 << 10, 0.085),
        (1 << 20, 0.086),
        (2 << 20, 0.08),
        (8 << 20, 0.11),
        (32 << 20, 0.098),
    ),
    fold=_nano(
        (512, 0.89),
        (2 << 10, 0.47),
        (8 << 10, 0.32),
        (32 << 10, 0.23),
        (128 << 10, 0.13),
        (512 << 10, 0.08),
        (1 << 20, 0.081),
        (2 << 20, 0.078),
        (8 << 20, 0.11),
        (32 << 20, 0.094),
    ),
    copy=_nano(
        (512, 0.077),
        (2 << 10, 0.071),
        (8 << 10, 0.033),
        (32 << 10, 0.0045),
        (128 << 10, 0.025),
        (512 << 10, 0.025),
        (1 << 20, 0.024),
        (2 << 20, 0.041),
        (8 << 20, 0.043),
        (32 << 20, 0.062),
    ),
    stream=_nano(
        (8 << 10, 0.38),
        (32 << 10, 0.26),
        (128 << 10, 0.22),
        (512 << 10, 0.18),
        (1 << 20, 0.18),
        (2 << 20, 0.2),
        (8 << 20, 0.2),
        (32 << 20, 0.21),
    ),
    one_way=_nano(
        (8 << 10, 0.4),
        (32 << 10, 0.37),
        (128 << 10, 0.2),
        (512 << 10, 0.11),
        (1 << 20, 0.097),
        (2 << 20, 0.096),
        (8 << 20, 0.12),
        (32 << 20, 0.12),
    ),
    pair=_nano(
        (512, 0.25),
        (2 << 10, 0.15),
        (8 << 10, 0.051),
        (32 << 10, 0.011),
        (128 << 10, 0.031),
        (512 << 10, 0.029),
        (1 << 20, 0.029),
        (2 << 20, 0.048),
        (8 << 20, 0.054),
        (32 << 20, 0.096),
    ),
    kernel=_nano(
        (32 << 10, 0.32),
        (128 << 10, 0.19),
        (512 << 10, 0.12),
        (1 << 20, 0.12),
        (2 << 20, 0.11),
        (8 << 20, 0.092),
        (32 << 20, 0.086),
    ),
    fill=_nano(
        (32 << 10, 0.29),
        (128 << 10, 0.12),
        (512 << 10, 0.072),
        (1 << 20, 0.057),
        (2 << 20, 0.074),
        (8 << 20, 0.1),
        (32 << 20, 0.092),
    ),
    written=_nano(
        (32 << 10, 0.27),
        (128 << 10, 0.17),
        (512 << 10, 0.15),
        (1 << 20, 0.14),
        (2 << 20, 0.16),
        (8 << 20, 0.17),
        (32 << 20, 0.16),
    ),
)
"""Two virtual cores (Intel Xeon, Sapphire Rapids), TCP over loopback, 2026-11-24, by `--measure`.

`hop` and `send` are halves of the time of passing on a few bytes.
"""
