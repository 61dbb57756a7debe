"""Groups' dumps as a picture: a row for each rank, a bar for each call; HTML or PNG.

A bar reaches from a call's begin to its end; a call that has not ended reaches to the dump's time.
Ranks on different hosts are aligned by their time of day, as far as the clocks agree. The file
loads nothing from elsewhere, and no text from a dump is run.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from nc10d.debug.diagnosis import Diagnosis, diagnose, report
from nc10d.errors import UnsupportedPlatform
from nc10d.group.flight_recorder import STARTED, Dump, Entry

MOST_BARS = 256
"""Only so many of a rank's latest calls are shown."""
_WIDTH, _LEFT, _ROW = 1200, 80, 22
COLOURS = {"completed": "#7fbf7f", "started": "#ffb02e", "different": "#e05050"}
GROUND, FAINT = "#f4f4f4", 0.55
_STYLE = f"""
body {{ font: 14px sans-serif; margin: 2em }} pre {{ background: {GROUND}; padding: 1em }}
text {{ font: 12px sans-serif; fill: #555 }} .message {{ opacity: {FAINT} }}
{" ".join(f".{kind} {{ fill: {colour} }}" for kind, colour in COLOURS.items())}
.row {{ fill: {GROUND} }}
"""


def html_page(groups: Sequence[Sequence[Dump]]) -> str:
    """Return an HTML page about groups' dumps: a report and a timeline for each group."""
    parts = [f"<pre>{escape(report(dumps))}</pre>\n{timeline(dumps)}" for dumps in groups]
    head = f"<!doctype html><meta charset=utf-8><title>nc10d dumps</title><style>{_STYLE}</style>"
    return head + "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class Bar:
    """A rank's call: the begin in ns after the first call shown, and the duration in ns."""

    rank: int
    kind: str
    message: bool
    begin: float
    lasts: float
    title: str


def bars(dumps: Sequence[Dump]) -> tuple[list[Bar], float]:
    """Return the calls by a group's ranks, and the ns from the first call to the latest dump."""
    diagnosis = diagnose(dumps)
    newest = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.written)}
    shown = {
        rank: [entry for entry in dump.entries if entry.begun][-MOST_BARS:]
        for rank, dump in sorted(newest.items())
    }
    begins = [newest[rank].day(entry.begun) for rank, own in shown.items() for entry in own]
    if not begins:
        return [], 1.0
    first, last = min(begins), max(dump.written * 1e9 for dump in newest.values())
    pairs = ((rank, entry) for rank, own in shown.items() for entry in own)
    found = (_bar(newest[rank], entry, diagnosis, first) for rank, entry in pairs)
    return [*found], max(last - first, 1.0)


def _bar(dump: Dump, entry: Entry, diagnosis: Diagnosis, first: float) -> Bar:
    begin = dump.day(entry.begun)
    end = dump.day(entry.ended) if entry.ended else dump.written * 1e9
    differs = diagnosis.different is not None and diagnosis.different[0] == entry.seq
    kind = "different" if differs and not entry.message else entry.state
    return Bar(dump.rank, kind, entry.message, begin - first, end - begin, _title(entry))


def _title(entry: Entry) -> str:
    lasted = "" if entry.state == STARTED else f", {(entry.ended - entry.begun) / 1e6:.3f} ms"
    return f"#{entry.seq} {entry.where}, {entry.state}{lasted}"


def timeline(dumps: Sequence[Dump]) -> str:
    """Return a group's calls over time as an SVG picture; the pointer on a bar shows its call."""
    found, span = bars(dumps)
    if not found:
        return "<p>no call has a time</p>"
    size = max(dump.size for dump in dumps)
    rows = "".join(map(_row, range(size)))
    drawn = "".join(_rectangle(bar, (_WIDTH - _LEFT) / span) for bar in found)
    room = f'width="{_WIDTH}" height="{_ROW * size}"'
    caption = f"<p>{span / 1e6:.1f} ms, to the latest dump</p>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {room}>{rows}{drawn}</svg>{caption}'


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


_INCHES, _ROW_INCHES, _HEAD_INCHES = 12.0, 0.3, 1.1
"""Width of a PNG, height of a rank's row, height above and below a group's rows."""
_THIN = 0.001
"""A bar's least width in a PNG, as a share of the whole."""


def write_png(groups: Sequence[Sequence[Dump]], path: Path) -> None:
    """Write a picture with a panel for each group; UnsupportedPlatform without matplotlib."""
    heights = [_HEAD_INCHES + _ROW_INCHES * max(dump.size for dump in dumps) for dumps in groups]
    figure = _figure(figsize=(_INCHES, sum(heights)), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
    for dumps, panel in zip(groups, panels, strict=True):
        _panel(panel, dumps)
    figure.savefig(path, format="png", dpi=100)


def _figure(**how: Any) -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure(**how)
    except ImportError as error:
        message = (
            'a PNG needs matplotlib: pip install ".[bench]" in a checkout; --html needs nothing'
        )
        raise UnsupportedPlatform(message) from error


def _panel(panel: Any, dumps: Sequence[Dump]) -> None:
    found, span = bars(dumps)
    size = max(dump.size for dump in dumps)
    panel.set_title(f"group {dumps[0].group!r}", loc="left", parse_math=False)
    panel.set(xlim=(0, span / 1e6), ylim=(size - 0.5, -0.5))
    panel.set_xlabel("ms, to the latest dump" if found else "no call has a time")
    panel.set_yticks(range(size), [f"rank {rank}" for rank in range(size)])
    panel.barh(range(size), span / 1e6, height=0.8, color=GROUND)
    for bar in found:
        panel.barh(
            bar.rank,
            max(bar.lasts, _THIN * span) / 1e6,
            left=bar.begin / 1e6,
            height=0.6,
            color=COLOURS[bar.kind],
            alpha=FAINT if bar.message else 1.0,
        )
    for kind, colour in COLOURS.items():
        panel.barh(0, 0, color=colour, label=kind)
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(COLOURS), frameon=False)
