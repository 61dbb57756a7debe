"""The timelines of groups as a PNG, by matplotlib; the same picture as `timeline` draws in HTML."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nc10d.debug.timeline import COLOURS, FAINT, GROUND, bars
from nc10d.errors import UnsupportedPlatform
from nc10d.group.flight_recorder import Dump

_WIDTH, _ROW, _HEAD = 12.0, 0.3, 1.1
"""Inches: width of the picture, height of a rank's row, height above and below a group's rows."""
_THIN = 0.001
"""The least width of a bar, as a share of the whole."""


def write_png(groups: Sequence[Sequence[Dump]], path: Path) -> None:
    """Write a picture with a panel for each group; UnsupportedPlatform without matplotlib."""
    heights = [_HEAD + _ROW * max(dump.size for dump in dumps) for dumps in groups]
    figure = _figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
    for dumps, panel in zip(groups, panels, strict=True):
        _panel(panel, dumps)
    figure.savefig(path, format="png", dpi=100)


def _figure(**how: Any) -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure(**how)
    except ImportError as error:
        message = 'a PNG needs matplotlib: pip install "nc10d[bench]"; --html needs nothing'
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
