"""Who is ahead: medians of rounds with their intervals, and the rules by which a cell is judged.

Pure. The interval of a median is that of order statistics: it holds for any distribution of times
(David and Nagaraja, Order Statistics, section 7.1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.93
"""What an interval should cover: five rounds, smallest to largest, cover 0.9375."""
SMALL = 1 << 10
"""Below this many bytes another rule holds: a microsecond more is no matter."""
LEAD, LEADING, LARGE = 1.5, {"all_reduce", "reduce_scatter"}, 1 << 20
"""How far ahead we mean to be, in which collectives, from how many bytes on."""
NEAR, NEAR_SMALL, MICROSECOND = 1.05, 1.25, 1e-6
Times = dict[str, list[float]]
"""Seconds of each thing in each round."""


@dataclass(frozen=True)
class Estimate:
    """A median with its interval, in seconds."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Estimate) -> bool:
        """Say whether the two may be the same for all that was measured."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        return f"{_us(self.median)} ({_us(self.low)}–{_us(self.high)})"


def _us(seconds: float) -> str:
    """Return µs to three places, of which none is invented for large ones."""
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def coverage(count: int, trimmed: int) -> float:
    """Return how surely the median lies between the order statistics, `trimmed` off either end."""
    outside = sum(math.comb(count, k) for k in range(trimmed + 1))
    return 1 - 2 * outside / float(1 << count)


def estimate(times: Sequence[float]) -> Estimate:
    """Return the median and its narrowest interval of CONFIDENCE; of few rounds, their range."""
    ordered, count = sorted(times), len(times)
    trimmed = 0
    while 2 * (trimmed + 1) < count and coverage(count, trimmed + 1) >= CONFIDENCE:
        trimmed += 1
    return Estimate(statistics.median(ordered), ordered[trimmed], ordered[count - 1 - trimmed])


def slower(everyones: Sequence[Times]) -> Times:
    """Return the slowest rank's time of each thing in each round."""
    return {
        name: [max(row) for row in zip(*(times[name] for times in everyones), strict=True)]
        for name in everyones[0]
    }


@dataclass(frozen=True)
class Verdict:
    """How we stand in one cell against the best peer; `ratio` above 1 is ahead."""

    best: str
    ratio: float
    word: str


def judge(nbytes: int, ours: Estimate, peers: Mapping[str, Estimate]) -> Verdict:
    """Judge one cell: ahead, tied or behind the peer with the smallest median."""
    best = min(peers, key=lambda name: peers[name].median)
    peer = peers[best]
    ratio = peer.median / ours.median
    if ours.high < peer.low:
        return Verdict(best, ratio, "ahead")
    return Verdict(best, ratio, "tied" if _near(nbytes, ours, peer) else "behind")


def _near(nbytes: int, ours: Estimate, peer: Estimate) -> bool:
    if nbytes >= SMALL:
        return ours.median <= NEAR * peer.median or ours.overlaps(peer)
    within = max(NEAR_SMALL * peer.median, peer.median + MICROSECOND)
    return ours.median <= within


def too_near(collective: str, nbytes: int, ratio: float) -> bool:
    """Say whether a cell that should be well ahead is not."""
    return collective in LEADING and nbytes >= LARGE and ratio < LEAD
