"""`python -m nc10d.bench`: what collectives cost on this machine; see `nc10d.bench.cli`.

With one of the options in TABLES it is another table, that of the module named there.
"""

from __future__ import annotations

import importlib

from nc10d.run.interrupt import quietly

TABLES = {
    "--compare": "compare",
    "--coalescing": "coalescing",
    "--ddp": "ddp",
    "--flatten": "flatten",
    "--kernels": "kernels",
    "--model": "predict",
    "--check-model": "predict",
    "--draw": "predict",
}


def main() -> int:
    """Read the command line, measure, print; return the exit code."""
    import sys

    words = sys.argv[1:]
    for word in words:
        table = TABLES.get(word.partition("=")[0])
        if table:
            return int(importlib.import_module(f"nc10d.bench.{table}").main(words))
    from nc10d.bench import cli

    return cli.run(cli.read(words))


if __name__ == "__main__":
    raise SystemExit(quietly(main))
