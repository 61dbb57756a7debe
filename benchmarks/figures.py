"""Makes all pictures of benchmarks: PNG files, by matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.estimates import Estimate, estimate

# Okabe and Ito's palette, which colour-blind readers can distinguish; nc10d's colour stands out.
COLOURS = {"nc10d": "#d55e00", "gloo": "#56b4e9", "mpich": "#009e73", "openmpi": "#0072b2"}
MARKERS = {"nc10d": "o", "gloo": "^", "mpich": "s", "openmpi": "D"}
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
COLUMNS = 4
DPI = 110
CellTimes = Mapping[tuple[str, int], Sequence[float]]
"""Seconds of each round, by collective and bytes."""


def new_figure(inches: tuple[float, float]) -> Any:
    """Return an empty figure; exit with a message if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("a picture needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=inches, dpi=DPI, layout="constrained")


def bytes_label(nbytes: int) -> str:
    """Return a size for people: 8 B, 64 KiB, 1.5 MiB."""
    for unit, name in UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"


def add_legend(figure: Any, handles: Sequence[Any], columns: int, **style: Any) -> None:
    """Add a legend below the panels."""
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    figure.legend(handles=handles, **place, **style)


def _over_bytes(panel: Any, sizes: Sequence[int], **labels: str) -> None:
    """Make the axes of a panel that shows µs over bytes, both logarithmic."""
    panel.set(xscale="log", yscale="log", **labels)
    panel.set_xticks(sizes, [bytes_label(nbytes) for nbytes in sizes], rotation=45, fontsize=8)
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def time_over_bytes(samples: Mapping[str, CellTimes], title: str, path: Path) -> None:
    """Draw a panel for each collective and a line for each library; bars are intervals."""
    names = list(dict.fromkeys(name for name, nbytes in samples["nc10d"] if nbytes))
    columns = min(COLUMNS, len(names))
    rows = -(-len(names) // columns)
    figure = new_figure((3.6 * columns, 3.2 * rows))
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel in panels[len(names) :]:
        panel.axis("off")
    for name, panel in zip(names, panels, strict=False):
        _measured(panel, name, samples)
    handles, _ = panels[0].get_legend_handles_labels()
    add_legend(figure, handles, len(handles))
    figure.suptitle(f"{title}: time of a call, median and its interval")
    figure.savefig(path)


def _measured(panel: Any, name: str, samples: Mapping[str, CellTimes]) -> None:
    sizes = [nbytes for other, nbytes in samples["nc10d"] if other == name]
    for library, times in samples.items():
        found = [estimate(times[name, nbytes]) for nbytes in sizes]
        panel.errorbar(
            sizes,
            [1e6 * cell.median for cell in found],
            yerr=_bars(found),
            label=library,
            color=COLOURS.get(library),
            marker=MARKERS.get(library, "x"),
            markersize=4,
            linewidth=2 if library == "nc10d" else 1.2,
            capsize=2,
            zorder=3 if library == "nc10d" else 2,
        )
    _over_bytes(panel, sizes, title=name, ylabel="µs")


def _bars(found: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths below and above each median, in µs."""
    return [
        [1e6 * (cell.median - cell.low) for cell in found],
        [1e6 * (cell.high - cell.median) for cell in found],
    ]
