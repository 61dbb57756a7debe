"""Pictures of measurements as PNG files, by matplotlib (extra `bench`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.verdicts import Estimate, estimate

# Okabe and Ito's palette, which colour-blind readers tell apart; ours stands out.
COLOURS = {"nc10d": "#d55e00", "gloo": "#56b4e9", "mpich": "#009e73", "openmpi": "#0072b2"}
MARKERS = {"nc10d": "o", "gloo": "^", "mpich": "s", "openmpi": "D"}
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
COLUMNS = 4
Times = Mapping[tuple[str, int], Sequence[float]]


def pyplot() -> Any:
    """Return matplotlib's plotting, without a window; SystemExit with a word if it is missing."""
    try:
        importlib.import_module("matplotlib").use("agg")
    except ImportError as error:
        raise SystemExit("a picture needs matplotlib: pip install matplotlib") from error
    return importlib.import_module("matplotlib.pyplot")


def bytes_label(nbytes: int) -> str:
    """Return a size as people say it: 8 B, 64 KiB, 16 MiB."""
    unit, name = next((unit, name) for unit, name in UNITS if nbytes >= unit)
    return f"{nbytes / unit:g} {name}"


def time_over_bytes(samples: Mapping[str, Times], title: str, path: Path) -> None:
    """Draw one panel a collective and one line a library; bars are the medians' intervals."""
    plt = pyplot()
    names = list(dict.fromkeys(name for name, nbytes in samples["nc10d"] if nbytes))
    columns = min(COLUMNS, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.6 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for panel in axes.flat[len(names) :]:
        panel.axis("off")
    for name, panel in zip(names, axes.flat, strict=False):
        _panel(panel, name, samples)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{title}: time of a call, median and its interval")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(panel: Any, name: str, samples: Mapping[str, Times]) -> None:
    sizes = [nbytes for other, nbytes in samples["nc10d"] if other == name]
    for library, times in samples.items():
        found = [estimate(times[name, nbytes]) for nbytes in sizes]
        panel.errorbar(
            sizes,
            [1e6 * one.median for one in found],
            yerr=_bars(found),
            label=library,
            color=COLOURS.get(library),
            marker=MARKERS.get(library, "x"),
            markersize=4,
            linewidth=2 if library == "nc10d" else 1.2,
            capsize=2,
            zorder=3 if library == "nc10d" else 2,
        )
    panel.set(xscale="log", yscale="log", title=name, ylabel="µs")
    panel.set_xticks(sizes, [bytes_label(nbytes) for nbytes in sizes], rotation=45, fontsize=8)
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def _bars(found: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths below and above each median, in µs."""
    return [
        [1e6 * (one.median - one.low) for one in found],
        [1e6 * (one.high - one.median) for one in found],
    ]
