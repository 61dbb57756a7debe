"""`python -m nc10d.bench`: the time of each collective in a job; see `nc10d.bench.cli`."""

from __future__ import annotations

import sys

from nc10d.bench import cli
from nc10d.run.signals import run_interruptible

MOVED = ("compare", "coalescing", "ddp", "flatten", "kernels", "model", "check-model", "draw")
"""Former options, which are tables of `python -m benchmarks` now."""


def main() -> int:
    """Read the command line, measure, print; return the exit code."""
    for word in sys.argv[1:]:
        table = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and table in MOVED:
            command = f"python -m nc10d.bench --{table}"
            told = f"{command} has moved: in a checkout, python -m benchmarks {table}"
            print(told, file=sys.stderr)
            return 2
    return cli.run(cli.read(sys.argv[1:]))


if __name__ == "__main__":
    raise SystemExit(run_interruptible(main))
