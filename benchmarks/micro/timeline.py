"""A timeline of callers and engines: what ran when, drawn from marks and the engine's trace.

`engine_spans` is pure. Times are nanoseconds of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.plots import pyplot
from nc10d.backend.cpu.native.offsets import TRACE_BLOCKED, TRACE_DONE, TRACE_START

PHASES = ("launch", "product", "wait")
COLOURS = {"launch": "#cc79a7", "product": "#56b4e9", "wait": "#f0e442", "all_reduce": "#d55e00"}
Span = tuple[int, int]


@dataclass(frozen=True)
class Lanes:
    """One rank: the ends of its caller's phases, and its engine's (from, to) of each operation.

    `pauses` are when the engine had to leave an operation because it waited for the other rank.
    """

    marks: Sequence[int]
    spans: Sequence[Span]
    pauses: Sequence[int] = ()


def engine_spans(rows: Iterable[Sequence[int]]) -> tuple[list[Span], list[int]]:
    """Return when operations began and ended, and when they paused, of the rows of a trace.

    What had begun before the trace, or did not end in it, is left out.
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


def draw(found: Mapping[str, Sequence[Lanes]], path: Path) -> None:
    """Draw a panel a scenario and two lanes a rank into a PNG file."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(found), 1, figsize=(10, 2.4 * len(found)), squeeze=False, layout="constrained"
    )
    for (title, ranks), panel in zip(found.items(), axes.flat, strict=True):
        _panel(panel, title, ranks)
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(patches, list(COLOURS), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(panel: Any, title: str, ranks: Sequence[Lanes]) -> None:
    start = min(lanes.marks[0] for lanes in ranks)
    names = []
    for rank, lanes in enumerate(ranks):
        names += [f"rank {rank}, caller", f"rank {rank}, engine"]
        for phase, begin, end in zip(PHASES, lanes.marks, lanes.marks[1:], strict=False):
            _bar(panel, 2 * rank, (begin - start, end - start), COLOURS[phase])
        for begin, end in lanes.spans:
            _bar(panel, 2 * rank + 1, (begin - start, end - start), COLOURS["all_reduce"])
        pauses = [(now - start) / 1e6 for now in lanes.pauses]
        panel.plot(pauses, [2 * rank + 1] * len(pauses), "|", color="black", markersize=5)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set(title=title, xlabel="ms")


def _bar(panel: Any, lane: int, span: Span, colour: str) -> None:
    begin, end = span
    panel.barh(lane, (end - begin) / 1e6, left=begin / 1e6, height=0.7, color=colour)
