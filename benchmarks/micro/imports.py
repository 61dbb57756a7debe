"""Measure `import nc10d` beside `import numpy`.

Each import runs in a fresh interpreter; the two take turns, and a figure is the median of the
rounds in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

ROUNDS = 21
STATEMENTS = ("import numpy", "import nc10d", "import numpy, nc10d; nc10d.all_reduce")


def milliseconds(statement: str) -> float:
    """Return how long a fresh interpreter takes to run a statement and to end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return (time.perf_counter() - start) * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print, with the ratio to the first."""
    argparse.ArgumentParser(prog="python -m benchmarks imports", description=__doc__).parse_args(
        arguments
    )
    times: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(ROUNDS):
        for statement, found in times.items():
            found.append(milliseconds(statement))
    first = statistics.median(times[STATEMENTS[0]])
    for statement, found in times.items():
        median = statistics.median(found)
        print(f"{statement:<40}{median:>8.1f} ms{median / first:>7.2f}")
    return 0
