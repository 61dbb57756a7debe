"""Count words of the old dialect in docstrings and comments: `python tools/prose.py`; see LIMITS.

House style wants nouns as subjects: a rank, the root, a peer, the caller. Words that stand in for a
noun are counted per 1,000 words, area by area, so that no folder hides behind another. The exit
code is 1 where an area exceeds a limit; PACKAGE_LIMITS hold for areas below nc10d only.
`--files AREA` lists the counts of each file in an area.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"who": 0.6, "what": 3.0, "one": 5.0, "tell": 1.5}
"""Most occurrences per 1,000 words."""
PACKAGE_LIMITS = {"it": 18.0, "of": 30.0}
"""The same for areas below nc10d."""
FORMS = {
    **dict.fromkeys(("who", "whom", "whoever"), "who"),
    **dict.fromkeys(("what", "whatever"), "what"),
    **dict.fromkeys(("one", "ones"), "one"),
    **dict.fromkeys(("tell", "tells", "telling", "told"), "tell"),
    **dict.fromkeys(("say", "says", "saying", "said"), "tell"),
    **dict.fromkeys(("it", "its"), "it"),
    "of": "of",
}
FOLDERS = ("nc10d", "benchmarks", "simulation", "tests", "tools", "examples")
SMALL = 500
"""An area with fewer words is allowed as many occurrences as one of this size."""
_WORD = re.compile(r"[A-Za-z][A-Za-z'’]*")
_CODE = re.compile(r"`[^`]*`|^ *(?:>>>|\.\.\.).*$", re.M)


def prose_of(source: str) -> str:
    """Return the docstrings, attribute docstrings and comments of a Python file."""
    strings = (
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return "\n".join([*strings, *comments])


def count(text: str) -> tuple[int, Counter[str]]:
    """Return the number of words, and how often each kind of FORMS occurs; code does not count.

    >>> count("Who led tells what `what` is. One tick.")
    (7, Counter({'who': 1, 'tell': 1, 'what': 1, 'one': 1}))
    """
    words = [word.lower() for word in _WORD.findall(_CODE.sub(" ", text))]
    return len(words), Counter(FORMS[word] for word in words if word in FORMS)


def area_of(path: Path) -> str:
    """Return the area of a file, relative to ROOT: two folders below nc10d, else one."""
    parts = path.parent.parts
    if not parts or parts[0] == "docs":
        return "pages"
    deep = 4 if parts[:3] == ("nc10d", "backend", "cpu") else 3 if len(parts) > 2 else 2
    return "/".join(parts[:deep]) if parts[0] == "nc10d" else parts[0]


def read(root: Path) -> Iterator[tuple[Path, int, Counter[str]]]:
    """Yield each file with its counts."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root), *count(prose_of(path.read_text()))
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        yield path.relative_to(root), *count(path.read_text())


def limits(area: str) -> dict[str, float]:
    """Return the limits that hold for an area, or for a file in the area."""
    return {**LIMITS, **PACKAGE_LIMITS} if area.startswith("nc10d/") else LIMITS


def rates(area: str, words: int, found: Counter[str]) -> dict[str, float]:
    """Return occurrences per 1,000 words."""
    return {kind: 1000 * found[kind] / max(words, SMALL) for kind in limits(area)}


def line(name: str, words: int, found: Counter[str]) -> str:
    """Return one row; a figure above its limit is marked."""
    shown = (
        f"{kind} {rate:5.1f}{'!' if rate > limits(name)[kind] else ' '}"
        for kind, rate in rates(name, words, found).items()
    )
    return f"{name:<44}{words:>7} words  {'  '.join(shown)}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Print what exceeds a limit; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", metavar="AREA", help="list the files of an area")
    parser.add_argument("--all", action="store_true", help="list every area")
    options = parser.parse_args(None if arguments is None else list(arguments))
    words: Counter[str] = Counter()
    found: dict[str, Counter[str]] = {}
    for path, size, kinds in read(ROOT):
        area = area_of(path)
        words[area] += size
        found.setdefault(area, Counter()).update(kinds)
        if options.files == area:
            print(line(str(path), size, kinds))
    bad = 0
    for area in sorted(found):
        shown = rates(area, words[area], found[area])
        over = any(rate > limits(area)[kind] for kind, rate in shown.items())
        bad += over
        if over or options.all:
            print(line(area, words[area], found[area]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
