"""`python -m simulation`: play a seed again, many seeds, or hunt the seeded bugs."""

from __future__ import annotations

import argparse
import sys
import time

from simulation.bugs import BUGS, BrokenBug, BugTargetMissing, hunt
from simulation.schedules import Failure, run, scenario_of


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code, 1 if a law was broken or a bug not found."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the schedule, or the first")
    parser.add_argument("--count", type=int, help="play so many schedules, quietly")
    parser.add_argument("--bug", choices=sorted(BUGS), help="with this bug in the product")
    parser.add_argument("--bugs", action="store_true", help="hunt all bugs; print their failures")
    asked = parser.parse_args(arguments)
    if asked.bugs:
        return _hunt_all(asked.count or 100_000)
    if asked.count:
        return _play_many(asked.seed, asked.count)
    if asked.bug:
        with BUGS[asked.bug].present():
            return _replay(asked.seed)
    return _replay(asked.seed)


def _replay(seed: int) -> int:
    print(f"seed {seed}: {scenario_of(seed)}")
    try:
        trace, failure = run(seed, verbose=True).trace, None
    except Failure as error:
        trace, failure = error.trace, error
    print(*trace, sep="\n")
    print(failure or "all laws held")
    return failure is not None


def _play_many(first: int, count: int) -> int:
    failed, begin = 0, time.process_time()
    for seed in range(first, first + count):
        try:
            run(seed)
        except Failure as failure:
            failed += 1
            print(failure)
    print(f"{count} schedules, {failed} failed, {time.process_time() - begin:.1f} s of CPU")
    return failed > 0


def _hunt_all(count: int) -> int:
    missed = 0
    for name, bug in BUGS.items():
        begin = time.process_time()
        try:
            failure = hunt(bug, count)
            found = "NOT FOUND" if failure is None else str(failure).partition("\n")[0]
            missed += failure is None
        except (BugTargetMissing, BrokenBug) as error:
            found = f"BROKEN: {error}"
            missed += 1
        print(f"{name:34} {time.process_time() - begin:6.2f} s  {found}", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
