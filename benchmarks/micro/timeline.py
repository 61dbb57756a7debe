"""A timeline of callers and engines, drawn from marks and the engine's trace.

`engine_spans` is pure. Times are nanoseconds of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import add_legend, new_figure
from nc10d.backend.cpu.native.offsets import TRACE_BLOCKED, TRACE_DONE, TRACE_START

PHASES = ("launch", "product", "wait")
COLOURS = {"launch": "#cc79a7", "product": "#56b4e9", "wait": "#f0e442", "all_reduce": "#d55e00"}
Span = tuple[int, int]


@dataclass(frozen=True)
class RankTimes:
    """A rank's times: ends of its caller's phases, and its engine's (begin, end) of each operation.

    `pauses` are the times at which the engine left an operation to wait for the other rank.
    """

    marks: Sequence[int]
    spans: Sequence[Span]
    pauses: Sequence[int] = ()


def engine_spans(rows: Iterable[Sequence[int]]) -> tuple[list[Span], list[int]]:
    """Return operations' begins and ends, and the pauses, from the rows of a trace.

    Operations that begin before the trace or end after it are left out.
    """
    begun: dict[int, int] = {}
    spans: list[Span] = []
    pauses: list[int] = []
    for now, _channel, event, descriptor in sorted(tuple(row) for row in rows):
        if event == TRACE_START:
            begun[descriptor] = now
        elif event == TRACE_BLOCKED:
            pauses.append(now)
        elif event == TRACE_DONE and descriptor in begun:
            spans.append((begun.pop(descriptor), now))
    return spans, pauses


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
        for begin, end in times.spans:
            _bar(panel, 2 * rank + 1, (begin - start, end - start), COLOURS["all_reduce"])
        pauses = [(now - start) / 1e6 for now in times.pauses]
        panel.plot(pauses, [2 * rank + 1] * len(pauses), "|", color="black", markersize=5)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set(title=title, xlabel="ms")


def _bar(panel: Any, row: int, span: Span, colour: str) -> None:
    begin, end = span
    panel.barh(row, (end - begin) / 1e6, left=begin / 1e6, height=0.7, color=colour)
