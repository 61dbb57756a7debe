"""A timeline of callers and engines, drawn from marks and the flight recorder's entries.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import add_legend, new_figure

PHASES = ("launch", "product", "wait")
COLOURS = {"launch": "#cc79a7", "product": "#56b4e9", "wait": "#f0e442", "all_reduce": "#d55e00"}
Span = tuple[int, int]


@dataclass(frozen=True)
class RankTimes:
    """A rank's times: ends of its caller's phases, begin and end of the operation in its engine."""

    marks: Sequence[int]
    span: Span


def draw(found: Mapping[str, Sequence[RankTimes]], path: Path) -> None:
    """Draw a panel for each scenario, with two rows for each rank, into a PNG file."""
    figure = new_figure((10, 2.4 * len(found)))
    panels = figure.subplots(len(found), 1, squeeze=False).flat
    for (title, ranks), panel in zip(found.items(), panels, strict=True):
        _panel(panel, title, ranks)
    patches = importlib.import_module("matplotlib.patches")
    handles = [patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    add_legend(figure, handles, len(handles))
    figure.savefig(path)


def _panel(panel: Any, title: str, ranks: Sequence[RankTimes]) -> None:
    start = min(times.marks[0] for times in ranks)
    names = []
    for rank, times in enumerate(ranks):
        names += [f"rank {rank}, caller", f"rank {rank}, engine"]
        for phase, begin, end in zip(PHASES, times.marks, times.marks[1:], strict=False):
            _bar(panel, 2 * rank, (begin - start, end - start), COLOURS[phase])
        begin, end = times.span
        _bar(panel, 2 * rank + 1, (begin - start, end - start), COLOURS["all_reduce"])
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set(title=title, xlabel="ms")


def _bar(panel: Any, row: int, span: Span, colour: str) -> None:
    begin, end = span
    panel.barh(row, (end - begin) / 1e6, left=begin / 1e6, height=0.7, color=colour)
