"""Refuse a name that stands for two things: `python tools/names.py`, run by `make lint`.

A module name or a public class name may occur once in the package. SHARED lists the exceptions.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "nc10d"
SHARED = {
    "backend": "each backend has its class in backend.py",
    "works": "each backend has its Works in works.py",
    "datatypes": "each library has its table of data types",
    "library": "each foreign library is loaded in library.py",
    "cli": "each command has its options in cli.py",
    "nccl": "nc10d.nccl is nc10d.api.nccl",
    "functional": "nc10d.functional, and the names of torch.distributed.nn.functional",
}
"""Module names that several folders use, with the reason."""


def names() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the files of each module name, and of each public class name."""
    modules: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        where = str(path.relative_to(PACKAGE.parent))
        if not path.stem.startswith("__"):
            modules[path.stem].append(where)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(where)
    return modules, classes


def main() -> int:
    """Print the names that occur twice; return the exit code."""
    modules, classes = names()
    twice = [
        f"{kind} {name}: {', '.join(places)}"
        for kind, found in (("module", modules), ("class", classes))
        for name, places in sorted(found.items())
        if len(places) > 1 and not (kind == "module" and name in SHARED)
    ]
    unused = [
        f"{name} in tools/names.py is no longer shared"
        for name in SHARED
        if len(modules.get(name, [])) < 2
    ]
    print(*twice, *unused, sep="\n", end="\n" if twice or unused else "")
    return 1 if twice or unused else 0


if __name__ == "__main__":
    sys.exit(main())
