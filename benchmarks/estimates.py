"""Medians of rounds with their intervals, and the rules by which a cell is compared.

Pure. The interval of a median is that of order statistics: it holds for any distribution of times
(David and Nagaraja, Order Statistics, section 7.1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.93
"""Probability that an interval covers the median; the range of five rounds has 0.9375."""
SMALL = 1 << 10
"""Below this many bytes a microsecond more does not count."""
LEAD, LEADING, LARGE = 1.5, {"all_reduce", "reduce_scatter"}, 1 << 20
"""The intended lead of nc10d: its ratio, its collectives, its smallest size."""
NEAR, NEAR_SMALL, MICROSECOND = 1.05, 1.25, 1e-6
Times = dict[str, list[float]]
"""Seconds by name, a value for each round."""


@dataclass(frozen=True)
class Estimate:
    """A median with its interval, in seconds."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Estimate) -> bool:
        """Return whether the intervals overlap."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        return f"{_us(self.median)} ({_us(self.low)}–{_us(self.high)})"


def _us(seconds: float) -> str:
    """Return µs with three significant digits; large times as whole µs."""
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def coverage(count: int, trimmed: int) -> float:
    """Return the probability that the range, `trimmed` values off either end, holds the median."""
    outside = sum(math.comb(count, k) for k in range(trimmed + 1))
    return 1 - 2 * outside / float(1 << count)


def estimate(times: Sequence[float]) -> Estimate:
    """Return the median and its narrowest interval of CONFIDENCE; of few rounds, the range."""
    ordered, count = sorted(times), len(times)
    trimmed = 0
    while 2 * (trimmed + 1) < count and coverage(count, trimmed + 1) >= CONFIDENCE:
        trimmed += 1
    return Estimate(statistics.median(ordered), ordered[trimmed], ordered[count - 1 - trimmed])


def slower(times_by_rank: Sequence[Times]) -> Times:
    """Return the slowest rank's time by name and round."""
    return {
        name: [max(row) for row in zip(*(times[name] for times in times_by_rank), strict=True)]
        for name in times_by_rank[0]
    }


@dataclass(frozen=True)
class Comparison:
    """nc10d against the best peer in a cell; above 1, `ratio` is nc10d's lead."""

    best: str
    ratio: float
    word: str


def compare(nbytes: int, ours: Estimate, peers: Mapping[str, Estimate]) -> Comparison:
    """Return ahead, tied or behind, against the peer with the smallest median."""
    best = min(peers, key=lambda name: peers[name].median)
    peer = peers[best]
    ratio = peer.median / ours.median
    if ours.high < peer.low:
        return Comparison(best, ratio, "ahead")
    return Comparison(best, ratio, "tied" if _near(nbytes, ours, peer) else "behind")


def _near(nbytes: int, ours: Estimate, peer: Estimate) -> bool:
    if nbytes >= SMALL:
        return ours.median <= NEAR * peer.median or ours.overlaps(peer)
    within = max(NEAR_SMALL * peer.median, peer.median + MICROSECOND)
    return ours.median <= within


def too_near(collective: str, nbytes: int, ratio: float) -> bool:
    """Return whether a cell that should be well ahead is not."""
    return collective in LEADING and nbytes >= LARGE and ratio < LEAD


def turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: each name first in turn, every other round backwards."""
    first = number % len(names)
    order = [*names[first:], *names[:first]]
    return order if number % 2 == 0 else order[::-1]
