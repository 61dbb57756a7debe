"""`python -m nc10d.bench`: the time of each collective in a job; see `nc10d.bench.cli`."""

from __future__ import annotations

import importlib
import sys

from nc10d.bench import cli
from nc10d.run.signals import run_interruptible

MOVED = ("compare", "coalescing", "ddp", "flatten", "kernels", "model", "check-model", "draw")
"""Former options, which are tables of `python -m benchmarks` now."""


def main() -> int:
    """Read the command line, measure, print; return the exit code."""
    words = sys.argv[1:]
    for at, word in enumerate(words):
        table, _, value = word.partition("=")
        if word.startswith("--") and table[2:] in MOVED:
            return _moved(table[2:], words[:at] + [value] * bool(value) + words[at + 1 :])
    return cli.run(cli.read(words))


def _moved(table: str, options: list[str]) -> int:
    """Name the new command, and run it where it is there; return the exit code."""
    command = f"python -m nc10d.bench --{table} has moved: in a checkout, python -m benchmarks"
    print(f"{command} {table}", file=sys.stderr)
    try:
        benchmarks = importlib.import_module("benchmarks.__main__")
    except ModuleNotFoundError:
        return 2
    return int(benchmarks.main([table, *options]))


if __name__ == "__main__":
    raise SystemExit(run_interruptible(main))
