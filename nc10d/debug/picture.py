"""The dumps of a group as a picture: a row a rank, a bar a call, over time, in one HTML file. Pure.

Bars reach from a call's begin to its end; one that has not ended goes on to the moment of the dump.
Ranks of different hosts are laid over each other by their clocks of the day, as far as these agree.
Nothing is loaded from elsewhere, and nothing that a dump contains is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from nc10d.debug.verdict import Verdict, judge, report
from nc10d.observe import STARTED, Dump, Entry

MOST_BARS = 256
"""Of one rank, the latest."""
_WIDTH, _LEFT, _ROW = 1200, 80, 22
_STYLE = """
body { font: 14px sans-serif; margin: 2em } pre { background: #f4f4f4; padding: 1em }
text { font: 12px sans-serif; fill: #555 }
.completed { fill: #7fbf7f } .started { fill: #ffb02e } .different { fill: #e05050 }
.message { opacity: 0.55 } .row { fill: #f4f4f4 }
"""


def page(groups: Sequence[Sequence[Dump]]) -> str:
    """Return the HTML of the dumps of some groups."""
    parts = [f"<pre>{escape(report(dumps))}</pre>\n{timeline(dumps)}" for dumps in groups]
    head = f"<!doctype html><meta charset=utf-8><title>nc10d dumps</title><style>{_STYLE}</style>"
    return head + "\n".join(parts) + "\n"


def timeline(dumps: Sequence[Dump]) -> str:
    """Return an SVG picture of what the ranks of a group did when; it says what when touched."""
    verdict = judge(dumps)
    newest = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.written)}
    shown = {rank: _timed(dump) for rank, dump in newest.items()}
    begins = [dump.day(entry.begun) for rank, dump in newest.items() for entry in shown[rank]]
    if not begins:
        return "<p>no call has a time</p>"
    first, last = min(begins), max(dump.written * 1e9 for dump in newest.values())
    scale = (_WIDTH - _LEFT) / max(last - first, 1.0)
    height = _ROW * verdict.size
    rows = "".join(_row(rank) for rank in range(verdict.size))
    bars = "".join(
        bar
        for rank, dump in sorted(newest.items())
        for bar in _bars(dump, shown[rank], verdict, first, scale)
    )
    span = f"<p>{(last - first) / 1e6:.1f} ms, to the latest dump</p>"
    size = f'width="{_WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{rows}{bars}</svg>{span}'


def _timed(dump: Dump) -> list[Entry]:
    return [entry for entry in dump.entries if entry.begun][-MOST_BARS:]


def _row(rank: int) -> str:
    top = _ROW * rank
    return (
        f'<rect class="row" x="{_LEFT}" y="{top + 2}" width="{_WIDTH - _LEFT}" '
        f'height="{_ROW - 4}"/><text x="0" y="{top + 15}">rank {rank}</text>'
    )


def _bars(
    dump: Dump, entries: Sequence[Entry], verdict: Verdict, first: float, scale: float
) -> Iterator[str]:
    for entry in entries:
        begin = dump.day(entry.begun)
        end = dump.day(entry.ended) if entry.ended else dump.written * 1e9
        x, width = _LEFT + (begin - first) * scale, max((end - begin) * scale, 1.0)
        yield (
            f'<rect class="{_kind(entry, verdict)}" x="{x:.1f}" y="{_ROW * dump.rank + 4}" '
            f'width="{width:.1f}" height="{_ROW - 8}"><title>{escape(_title(entry))}</title></rect>'
        )


def _kind(entry: Entry, verdict: Verdict) -> str:
    if entry.message:
        return f"{entry.state} message"
    differs = verdict.different is not None and verdict.different[0] == entry.seq
    return "different" if differs else entry.state


def _title(entry: Entry) -> str:
    lasted = "" if entry.state == STARTED else f", {(entry.ended - entry.begun) / 1e6:.3f} ms"
    return f"#{entry.seq} {entry.where}, {entry.state}{lasted}"
