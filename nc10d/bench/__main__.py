"""`python -m nc10d.bench`: each collective's time in a job; see `nc10d.bench.cli`."""

from __future__ import annotations

import sys

from nc10d.bench import cli
from nc10d.run.signals import run_interruptible


def main() -> int:
    """Read the command line, measure, print; return the exit code."""
    return cli.run(cli.read(sys.argv[1:]))


if __name__ == "__main__":
    raise SystemExit(run_interruptible(main))
