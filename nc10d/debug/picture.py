"""The dumps of a group as a picture: a row a rank, a column a call, in one HTML file. Pure.

Where the engine knows when calls began, a cell tells by how much later than the first rank its
rank came. Nothing is loaded from elsewhere, and nothing that a dump contains is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nc10d.debug.verdict import Verdict, judge, report
from nc10d.observe import STARTED, Dump, Entry

_STYLE = """
body { font: 14px sans-serif; margin: 2em } pre { background: #f4f4f4; padding: 1em }
table { border-collapse: collapse } td, th { padding: 3px 8px; font-size: 12px; text-align: left }
.completed { background: #cfe8cf } .started { background: #ffd27f }
.different { background: #f4a0a0 } .nothing { background: #eee }
th { font-weight: normal; color: #555 }
"""


def page(groups: Sequence[Sequence[Dump]]) -> str:
    """Return the HTML of the dumps of some groups."""
    parts = [f"<pre>{escape(report(dumps))}</pre>\n{_table(dumps)}" for dumps in groups]
    head = f"<!doctype html><meta charset=utf-8><title>nc10d dumps</title><style>{_STYLE}</style>"
    return head + "\n".join(parts) + "\n"


def _table(dumps: Sequence[Dump]) -> str:
    verdict = judge(dumps)
    calls = {dump.rank: {entry.seq: entry for entry in dump.entries} for dump in dumps}
    seqs = sorted({seq for entries in calls.values() for seq in entries})
    begun = {seq: _first(entries.get(seq) for entries in calls.values()) for seq in seqs}
    header = "<tr><th></th>" + "".join(f"<th>#{seq}</th>" for seq in seqs) + "</tr>"
    rows = [
        f"<tr><th>rank {rank}</th>"
        + "".join(_cell(calls.get(rank, {}).get(seq), seq, verdict, begun[seq]) for seq in seqs)
        + "</tr>"
        for rank in range(verdict.size)
    ]
    return f"<table>{header}{''.join(rows)}</table>"


def _first(entries: object) -> int:
    times = [entry.begun for entry in entries if entry is not None and entry.begun]  # type: ignore[attr-defined]
    return min(times, default=0)


def _cell(entry: Entry | None, seq: int, verdict: Verdict, first: int) -> str:
    if entry is None:
        return '<td class="nothing"></td>'
    differs = verdict.different is not None and verdict.different[0] == seq
    kind = "different" if differs else ("started" if entry.state == STARTED else "completed")
    late = f" +{(entry.begun - first) / 1e6:.1f} ms" if entry.begun and first else ""
    return f'<td class="{kind}" title="{escape(entry.call)}">{escape(entry.op)}{late}</td>'
