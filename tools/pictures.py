"""Draw the pictures of the pages in docs: `python tools/pictures.py --write`.

A picture has a row of cells per rank, before and after the call. The cells after it come from the
table of oracles below, on letters in place of numbers. The colours are readable on light and dark
pages. Without --write, the exit code is 1 if a picture in docs/pictures is not current.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COLOURS = ["#3f6fb5", "#b5651d", "#3d8a4e"]
"""One per rank."""
MIXED, EMPTY, TEXT = "#7d4f9e", "none", "#808080"
CELL, GAP, LEFT = 44, 10, 64
Rows = list[list[str]]
"""The cells of each rank: "a1" is element 1 of rank 0, "Σ1" the reduction of elements 1."""


def rows(width: int = 3) -> Rows:
    """Return the inputs: `width` elements of each rank."""
    return [[f"{letter}{i}" for i in range(width)] for letter in "abc"]


def reduced(x: Rows) -> list[str]:
    """Return the reduction of all ranks' cells."""
    return [f"Σ{i}" for i in range(len(x[0]))]


def prefixes(x: Rows) -> Rows:
    """Return the reductions of the ranks up to each rank: "ab1" for the ranks 0 and 1."""
    return [[f"{'abc'[: r + 1]}{i}" for i in range(len(x[0]))] for r in range(3)]


ORACLES: dict[str, tuple[Rows, Callable[[Rows], Rows]]] = {
    "all_reduce": (rows(), lambda x: [reduced(x)] * 3),
    "reduce": (rows(), lambda x: [x[0], reduced(x), x[2]]),
    "broadcast": ([["", "", ""], rows()[1], ["", "", ""]], lambda x: [x[1]] * 3),
    "scan": (rows(), prefixes),
    "exscan": (rows(), lambda x: [x[0], *prefixes(x)[:2]]),
    "all_gather": (rows(1), lambda x: [[y[0] for y in x]] * 3),
    "gather": (rows(1), lambda x: [[], [y[0] for y in x], []]),
    "scatter": ([[], rows()[1], []], lambda x: [[cell] for cell in x[1]]),
    "reduce_scatter": (rows(), lambda x: [[cell] for cell in reduced(x)]),
    "all_to_all": (rows(), lambda x: [[y[r] for y in x] for r in range(3)]),
    "send": ([["a0"], [""], []], lambda x: [x[0], x[0], []]),
}
"""The input of each call, and its result; the root is rank 1."""


def colour(cell: str) -> str:
    """Return the colour of a cell: its rank's, or that of a reduction."""
    mixed = cell[:1] == "Σ" or cell[:2] == "ab"
    return EMPTY if not cell else MIXED if mixed else COLOURS["abc".index(cell[0])]


def text(x: float, y: float, words: str, fill: str = TEXT, anchor: str = "middle") -> str:
    """Return a line of text."""
    style = f'fill="{fill}" text-anchor="{anchor}" dominant-baseline="central"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def cells(left: float, ranks: Rows) -> list[str]:
    """Return the boxes of all ranks, from `left` on."""
    made = []
    for r, row in enumerate(ranks):
        top = 30 + r * (CELL + GAP)
        for i, cell in enumerate(row):
            x = left + i * CELL
            box = f'x="{x}" y="{top}" width="{CELL - 3}" height="{CELL - 3}" rx="6"'
            dashed = "" if cell else ' stroke-dasharray="4 4"'
            made.append(f'<rect {box} fill="{colour(cell)}" stroke="{TEXT}"{dashed}/>')
            if cell:
                made.append(text(x + (CELL - 3) / 2, top + (CELL - 3) / 2, cell, "#ffffff"))
    return made


def svg(width: float, height: float, title: str, parts: list[str]) -> str:
    """Return a picture of these parts."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'font-family="system-ui, sans-serif" font-size="15"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def drawn(name: str) -> str:
    """Return the picture of a call."""
    before, oracle = ORACLES[name]
    after = oracle(before)
    wide = max(1, *map(len, before)) * CELL
    right = LEFT + wide + 110
    middle = 30 + 1.5 * (CELL + GAP) - GAP / 2
    arrow = LEFT + wide + 20
    labels = [
        text(0, 30 + r * (CELL + GAP) + CELL / 2, f"rank {r}", anchor="start") for r in (0, 1, 2)
    ]
    parts = [
        text(LEFT, 12, "before", anchor="start"),
        text(right, 12, "after", anchor="start"),
        *labels,
        *cells(LEFT, before),
        f'<path d="M{arrow} {middle} h56 m-9 -7 l9 7 l-9 7" fill="none" stroke="{TEXT}"'
        ' stroke-width="2"/>',
        *cells(right, after),
    ]
    total = right + max(1, *map(len, after)) * CELL
    return svg(max(total, 300), 30 + 3 * (CELL + GAP), f"{name} of three ranks", parts)


def overview() -> str:
    """Return the picture of the first page: ranks of two machines, and the ways between them."""
    parts = []
    for host in range(2):
        left = 10 + host * 300
        box = f'x="{left}" y="30" width="260" height="150" rx="10"'
        parts.append(f'<rect {box} fill="none" stroke="{TEXT}"/>')
        parts.append(text(left + 130, 14, f"machine {host}"))
        for i in range(2):
            rank, x = 2 * host + i, left + 20 + 120 * i
            place = f'x="{x}" y="48" width="100" height="52" rx="8"'
            fill = [*COLOURS, MIXED][rank]
            parts.append(f'<rect {place} fill="{fill}"/>')
            parts.append(text(x + 50, 64, f"rank {rank}", "#ffffff"))
            parts.append(text(x + 50, 85, "arrays", "#ffffff"))
            parts.append(f'<path d="M{x + 50} 100 v30" stroke="{TEXT}" stroke-width="2"/>')
        place = f'x="{left + 20}" y="130" width="220" height="34" rx="8"'
        parts.append(f'<rect {place} fill="none" stroke="{TEXT}" stroke-dasharray="4 4"/>')
        parts.append(text(left + 130, 147, "shared memory"))
    parts.append(f'<path d="M270 105 h40" stroke="{TEXT}" stroke-width="2"/>')
    parts.append(text(290, 90, "TCP"))
    return svg(580, 190, "Ranks of two machines: shared memory inside, TCP between", parts)


def leaf_tree() -> str:
    """Draw the tree over 8 leaves, whose colours are the 3 ranks that hold them."""
    owners, step, row = [0, 0, 0, 1, 1, 1, 2, 2], 62, 56
    parts: list[str] = []
    for level in range(4):
        for number in range(8 >> level):
            leaves = range(number << level, (number + 1) << level)
            x, y = 40 + step * (leaves[0] + leaves[-1]) / 2, 26 + row * (3 - level)
            ranks = {owners[leaf] for leaf in leaves}
            fill = COLOURS[ranks.pop()] if len(ranks) == 1 else MIXED
            if level:
                for child in (2 * number, 2 * number + 1):
                    width = 1 << (level - 1)
                    below = 40 + step * (2 * child * width + width - 1) / 2
                    line = f'x1="{x}" y1="{y}" x2="{below}" y2="{y + row}"'
                    parts.insert(0, f'<line {line} stroke="{TEXT}" stroke-width="2"/>')
            parts.append(f'<circle cx="{x}" cy="{y}" r="19" fill="{fill}"/>')
            name = str(leaves[0]) if level == 0 else f"{leaves[0]}–{leaves[-1]}"
            parts.append(text(x, y, name, "#ffffff"))
    for rank, place in enumerate((1, 4, 6.5)):
        parts.append(text(40 + step * place, 26 + 3.6 * row, f"rank {rank}"))
    return svg(80 + 7 * step, 242, "The sum over 8 leaves on 3 ranks", parts)


def pictures() -> dict[Path, str]:
    """Return every picture by its path."""
    made = {FOLDER / f"{name}.svg": drawn(name) for name in ORACLES}
    return {**made, FOLDER / "overview.svg": overview(), FOLDER / "leaf_tree.svg": leaf_tree()}


def main() -> int:
    """Write the pictures, or compare them; return 1 if one is not current."""
    made = pictures()
    if sys.argv[1:] == ["--write"]:
        for path, picture in made.items():
            path.write_text(picture)
    wrong = [path for path, picture in made.items() if path.read_text() != picture]
    print(*(f"{path} is not current" for path in wrong), sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
