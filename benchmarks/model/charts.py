"""The plot of predictions: time over bytes, a line a world, a mark where the algorithm changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.model.draw import amount, new_figure


@dataclass(frozen=True, slots=True)
class Line:
    """Predicted seconds at sizes in bytes, and from which sizes on there is another algorithm."""

    label: str
    sizes: Sequence[int]
    times: Sequence[float]
    switches: Sequence[int]


def chart(lines: Sequence[Line], path: Path) -> None:
    """Write a PNG; needs matplotlib."""
    figure = new_figure((9, 5.5))
    axes: Any = figure.add_subplot()
    for line in lines:
        us = [seconds * 1e6 for seconds in line.times]
        (drawn,) = axes.plot(line.sizes, us, "o-", markersize=4, label=line.label)
        _marks(axes, line, drawn.get_color())
    axes.set(xscale="log", yscale="log", ylabel="predicted µs a call")
    sizes = sorted({nbytes for line in lines for nbytes in line.sizes})
    axes.set_xticks(sizes, [amount(nbytes) for nbytes in sizes], fontsize=9)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.plot([], [], "|", color="#333333", markersize=14, label="choose.py switches")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def _marks(axes: Any, line: Line, colour: str) -> None:
    for nbytes in line.switches:
        if line.sizes[0] <= nbytes <= line.sizes[-1]:
            axes.plot(nbytes, 1e6 * between(line, nbytes), "|", color=colour, markersize=16, mew=2)


def between(line: Line, nbytes: int) -> float:
    """Return the seconds at a size between two of the line's."""
    pairs = list(zip(line.sizes, line.times, strict=True))
    for (low, fast), (high, slow) in pairwise(pairs):
        if low <= nbytes <= high:
            return fast + (slow - fast) * (nbytes - low) / (high - low)
    return pairs[-1][1]
