"""The dumps of a group as a picture: a row a rank, a bar a call, over time, in one HTML file. Pure.

Bars reach from a call's begin to its end; one that has not ended goes on to the moment of the dump.
Ranks of different hosts are laid over each other by their clocks of the day, as far as these agree.
Nothing is loaded from elsewhere, and nothing that a dump contains is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nc10d.debug.diagnosis import Diagnosis, judge, report
from nc10d.group.flight_recorder import STARTED, Dump, Entry

MOST_BARS = 256
"""Of one rank, the latest."""
_WIDTH, _LEFT, _ROW = 1200, 80, 22
COLOURS = {"completed": "#7fbf7f", "started": "#ffb02e", "different": "#e05050"}
GROUND, FAINT = "#f4f4f4", 0.55
_STYLE = f"""
body {{ font: 14px sans-serif; margin: 2em }} pre {{ background: {GROUND}; padding: 1em }}
text {{ font: 12px sans-serif; fill: #555 }} .message {{ opacity: {FAINT} }}
{" ".join(f".{kind} {{ fill: {colour} }}" for kind, colour in COLOURS.items())}
.row {{ fill: {GROUND} }}
"""


def page(groups: Sequence[Sequence[Dump]]) -> str:
    """Return the HTML of the dumps of some groups."""
    parts = [f"<pre>{escape(report(dumps))}</pre>\n{timeline(dumps)}" for dumps in groups]
    head = f"<!doctype html><meta charset=utf-8><title>nc10d dumps</title><style>{_STYLE}</style>"
    return head + "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class Bar:
    """One call: of a rank, from when for how long, in ns after the first that is shown."""

    rank: int
    kind: str
    message: bool
    begin: float
    lasts: float
    title: str


def bars(dumps: Sequence[Dump]) -> tuple[list[Bar], float]:
    """Return the calls of a group's ranks, and the ns from the first to the latest dump."""
    verdict = judge(dumps)
    newest = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.written)}
    shown = {rank: _timed(dump) for rank, dump in sorted(newest.items())}
    begins = [newest[rank].day(entry.begun) for rank, own in shown.items() for entry in own]
    if not begins:
        return [], 1.0
    first, last = min(begins), max(dump.written * 1e9 for dump in newest.values())
    found = (_bar(newest[rank], one, verdict, first) for rank, own in shown.items() for one in own)
    return [*found], max(last - first, 1.0)


def _timed(dump: Dump) -> list[Entry]:
    return [entry for entry in dump.entries if entry.begun][-MOST_BARS:]


def _bar(dump: Dump, entry: Entry, verdict: Diagnosis, first: float) -> Bar:
    begin = dump.day(entry.begun)
    end = dump.day(entry.ended) if entry.ended else dump.written * 1e9
    kind = _kind(entry, verdict)
    return Bar(dump.rank, kind, entry.message, begin - first, end - begin, _title(entry))


def _kind(entry: Entry, verdict: Diagnosis) -> str:
    differs = verdict.different is not None and verdict.different[0] == entry.seq
    return "different" if differs and not entry.message else entry.state


def _title(entry: Entry) -> str:
    lasted = "" if entry.state == STARTED else f", {(entry.ended - entry.begun) / 1e6:.3f} ms"
    return f"#{entry.seq} {entry.where}, {entry.state}{lasted}"


def timeline(dumps: Sequence[Dump]) -> str:
    """Return an SVG picture of what the ranks of a group did when; it says what when touched."""
    found, span = bars(dumps)
    if not found:
        return "<p>no call has a time</p>"
    size = max(dump.size for dump in dumps)
    rows = "".join(map(_row, range(size)))
    drawn = "".join(_rectangle(bar, (_WIDTH - _LEFT) / span) for bar in found)
    room = f'width="{_WIDTH}" height="{_ROW * size}"'
    told = f"<p>{span / 1e6:.1f} ms, to the latest dump</p>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {room}>{rows}{drawn}</svg>{told}'


def _row(rank: int) -> str:
    top = _ROW * rank
    return (
        f'<rect class="row" x="{_LEFT}" y="{top + 2}" width="{_WIDTH - _LEFT}" '
        f'height="{_ROW - 4}"/><text x="0" y="{top + 15}">rank {rank}</text>'
    )


def _rectangle(bar: Bar, scale: float) -> str:
    kind = bar.kind + (" message" if bar.message else "")
    x, width = _LEFT + bar.begin * scale, max(bar.lasts * scale, 1.0)
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{_ROW * bar.rank + 4}" width="{width:.1f}" '
        f'height="{_ROW - 8}"><title>{escape(bar.title)}</title></rect>'
    )
