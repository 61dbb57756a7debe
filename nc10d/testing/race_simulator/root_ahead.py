"""What the simulator makes of rounds in which one rank leads: it shows, and goes on.

Who led where another did notices it when all are known to have left that round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nc10d.backend.cpu.native.offsets import AHEAD_RING
from nc10d.backend.cpu.program.program import INLINE_BYTES, Step, StepKind
from nc10d.testing.race_simulator.vector_clocks import Disagreement, Region

if TYPE_CHECKING:
    from nc10d.testing.race_simulator.simulator import SimulatedRank


@dataclass(slots=True)
class ShownRound:
    """What a rank has shown in a round: the tick that ends it (negative: it follows), its call."""

    region: Region
    tick: int = 0
    call: int = 0


@dataclass(slots=True)
class Leading:
    """The latest such rounds of a rank, and the first one that it led and has to look back at."""

    rank: int
    since: int | None = None
    ring: list[ShownRound] = field(init=False)

    def __post_init__(self) -> None:
        self.ring = [
            ShownRound(Region(f"led {self.rank}/{slot}", np.zeros(INLINE_BYTES, np.uint8)))
            for slot in range(AHEAD_RING)
        ]

    def shown(self, number: int) -> ShownRound:
        """Return what is for round `number`."""
        return self.ring[number % AHEAD_RING]


def settle(me: SimulatedRank) -> None:
    """Look back at the rounds that I led in and all have left."""
    if me.leading.since is None:
        return
    for number in range(me.leading.since, me.round):
        mine = me.leading.shown(number)
        if abs(mine.tick) > me.met:
            me.leading.since = number
            return
        for peer in me.others if mine.tick > 0 else ():
            theirs = me.world.ranks[peer].leading.shown(number)
            theirs.region.touch(0, INLINE_BYTES, me.rank, me.clock, write=False)
            if theirs.tick == mine.tick:
                raise Disagreement(f"ranks {me.rank} and {peer} both led at tick {mine.tick}")
    me.leading.since = None


def _begin(me: SimulatedRank, step: Step) -> bool:
    del me, step
    return True


def _lead(me: SimulatedRank, step: Step) -> bool:
    mine = me.leading.shown(me.round)
    mine.region.touch(0, INLINE_BYTES, me.rank, me.clock, write=True)
    mine.region.data[: step.nbytes] = me.view(step.src, step.nbytes, write=False)
    mine.tick, mine.call = me.seq + 1, me.queue[0][0].call.fingerprint()
    if me.leading.since is None:
        me.leading.since = me.round
    return True


def _listen(me: SimulatedRank, step: Step) -> bool:
    mine = me.leading.shown(me.round)
    mine.region.touch(0, INLINE_BYTES, me.rank, me.clock, write=True)
    mine.tick = -me.seq - 1
    if me.world.ranks[step.peer].leading.shown(me.round).tick == mine.tick:
        raise Disagreement(f"ranks {me.rank} and {step.peer} both follow at tick {me.seq}")
    return True


def _follow(me: SimulatedRank, step: Step) -> bool:
    theirs = me.world.ranks[step.peer].leading.shown(me.round)
    theirs.region.touch(0, INLINE_BYTES, me.rank, me.clock, write=False)
    if (theirs.tick, theirs.call) != (me.seq + 1, me.queue[0][0].call.fingerprint()):
        raise Disagreement(f"rank {me.rank} follows rank {step.peer} at tick {me.seq}")
    me.view(step.dst, step.nbytes, write=True)[:] = theirs.region.data[: step.nbytes]
    return True


HANDLERS: dict[StepKind, Callable[[SimulatedRank, Step], bool]] = {
    StepKind.BEGIN: _begin,
    StepKind.LEAD: _lead,
    StepKind.LISTEN: _listen,
    StepKind.FOLLOW: _follow,
}
