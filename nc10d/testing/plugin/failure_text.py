"""The text of a failed run of ranks: each rank once, with lines from the user's code only."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr

from nc10d.base.text import ranks_text
from nc10d.testing.outcomes import REPORT, Frames, RankEnd, RunReport

MOST_FRAMES = 4
"""Most lines from a traceback: the outermost, and the innermost."""
MOST_LINES = 12
"""Most lines from an error's message."""


class RankFailure(TerminalRepr):
    """The failure text of a run of ranks; pytest shows `reprcrash` in its summary."""

    def __init__(self, lines: Sequence[str], crash: ReprFileLocation) -> None:
        self.lines, self.reprcrash = lines, crash

    def toterminal(self, tw: Any) -> None:
        """Write the text; error messages are red."""
        for line in self.lines:
            for part in textwrap.wrap(line, max(40, tw.fullwidth - 1), **_WRAP) or [""]:
                tw.line(part, red=line.startswith("E"), bold=line.startswith("rank"))


_WRAP: dict[str, Any] = {
    "subsequent_indent": "      ",
    "drop_whitespace": True,
    "break_long_words": False,
    "break_on_hyphens": False,
}


def failure(error: BaseException, item: pytest.Item) -> RankFailure | None:
    """Return the text for an error with a RunReport; None where the user wants pytest's own."""
    options = item.config.option
    if options.fulltrace or options.tbstyle in ("native", "no"):
        return None
    report: RunReport = getattr(error, REPORT)
    lines = [*describe(report), *_notes(error, report)]
    site = next((end.frames[-1].site for end in report.ends if end.frames), "")
    path, _, line = site.rpartition(":")
    who = next((line.partition(":")[0] for line in lines if line.startswith("rank")), "")
    errors = (line for line in lines if line.startswith("E") and line[1:].strip())
    first = next(errors, f"E   {error}")
    crash = f"{who}: {first.removeprefix('E   ')}"
    return RankFailure(lines, ReprFileLocation(path, int(line.split()[0]) if line else 0, crash))


def describe(report: RunReport) -> Iterator[str]:
    """Yield the lines about all ranks: the failed ranks first, then the others."""
    size = len(report.ends)
    yield f"{size} rank{'s' * (size > 1)} as {report.kind}"
    groups: dict[Any, list[int]] = {}
    for rank, end in enumerate(report.ends):
        groups.setdefault(_likeness(end), []).append(rank)
    for ranks in sorted(groups.values(), key=lambda ranks: (_order(report.ends[ranks[0]]), ranks)):
        yield from _describe_end(ranks, [report.ends[rank] for rank in ranks])


_STATES = {
    "raised": ("was waiting", "were waiting"),
    "running": ("is still running", "are still running"),
    "returned": ("returned", "returned"),
    "killed": ("was killed by a fault", "were killed by faults"),
}


def _order(end: RankEnd) -> int:
    return [*_STATES].index(end.state) + (2 if end.secondary else 0)


_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def _likeness(end: RankEnd) -> object:
    if end.state == "raised" and not end.secondary:
        return end.error, _ADDRESS.sub("", end.message)
    return end.state, end.secondary, end.frames, end.remarks


def _describe_end(ranks: Sequence[int], ends: Sequence[RankEnd]) -> Iterator[str]:
    end, who = ends[0], ranks_text(ranks)
    last = end.frames[-1] if end.frames else None
    if end.state == "raised" and not end.secondary:
        yield ""
        yield f"{who}: {end.error}"
        yield from _tracebacks(ranks, ends)
        message = end.message.splitlines() or [end.error]
        yield from (f"E   {line}" for line in message[:MOST_LINES])
        if len(message) > MOST_LINES:
            yield f"E   ... {len(message) - MOST_LINES} more lines"
        yield from (f"    because of {cause}" for cause in end.causes)
    else:
        state = _STATES[end.state][len(ranks) > 1]
        where = f" at {last.site} in {last.function}: {last.text}" if last else ""
        yield ""
        yield f"{who}: {state}{where}"
    yield from (f"    {remark}" for remark in end.remarks)


def _tracebacks(ranks: Sequence[int], ends: Sequence[RankEnd]) -> Iterator[str]:
    """Yield the lines for the ranks that share an error; each distinct place once."""
    places: dict[Any, list[int]] = {}
    for rank, end in zip(ranks, ends, strict=True):
        places.setdefault(end.frames, []).append(rank)
    for frames, those in places.items():
        if len(places) > 1:
            yield f"  {ranks_text(those)}:"
        frames = _merged(frames)
        hidden = len(frames) - MOST_FRAMES
        shown = frames if hidden <= 0 else [frames[0], *frames[1 - MOST_FRAMES :]]
        for index, frame in enumerate(shown):
            if index == 1 and hidden > 0:
                yield f"    ... {hidden} more"
            yield f"  {frame.site} in {frame.function}"
            yield f"      {frame.text}"


def _merged(frames: Frames) -> Frames:
    """Leave out a comprehension in the previous frame's line."""
    before = [None, *(frame.site for frame in frames)]
    return tuple(
        frame
        for site, frame in zip(before, frames, strict=False)
        if frame.function not in _COMPREHENSIONS or frame.site != site
    )


def _notes(error: BaseException, report: RunReport) -> Iterator[str]:
    """Yield notes that others have added to the error, such as hypothesis' example."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith("Explanation:"):
            return  # hypothesis' is about this thread, which runs none of the user's lines
        if note not in report.notes and not note.startswith("on its own rank:"):
            yield ""
            yield from note.splitlines()
