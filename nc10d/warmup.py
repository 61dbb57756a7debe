"""`python -m nc10d.warmup`: compile everything now, so that later first uses only load it.

Compiles the CPU engine and every kernel into the cache folder (see `nc10d.kernels.folder`), by
two processes side by side where there are two cores. Running it again costs a second or two.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable

ENGINE = "nc10d.backend.cpu.native.engine"
Task = tuple[str, Callable[[], object]]


def main(arguments: list[str] | None = None) -> int:
    """Compile all there is; return the number of processes that failed."""
    options = _parse(arguments)
    if options.share is not None:
        _compile(options.share, options.jobs)
        return 0
    started = time.perf_counter()
    helpers = [_helper(share, options.jobs) for share in range(1, options.jobs)]
    count = _compile(0, options.jobs)
    failed = sum(helper.wait() != 0 for helper in helpers)
    print(f"{count} functions ready in {time.perf_counter() - started:.1f} s", flush=True)
    return failed


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nc10d.warmup", description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=min(2, cores), help="processes to use")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _helper(share: int, jobs: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nc10d.warmup", "--jobs", str(jobs), "--share", str(share)]
    return subprocess.Popen(command)


def _tasks() -> list[Task]:
    """Return every function to compile; the engine comes first because it takes longest."""
    from nc10d.kernels import reduce

    return [("engine", _warm_engine), *reduce.every_kernel()]


def _warm_engine() -> None:
    # Its functions are compiled as the module is imported.
    importlib.import_module(ENGINE)


def _compile(share: int, jobs: int) -> int:
    """Compile the tasks of this share; return how many there are in all."""
    tasks = _tasks()
    mine = _deal(tasks, share, jobs)
    for number, (name, make) in enumerate(mine, start=1):
        if sys.stdout.isatty():
            print(f"\r{number:4d}/{len(mine)}  {name:30}", end="\r", flush=True)
        make()
    return len(tasks)


def _deal(tasks: list[Task], share: int, jobs: int) -> list[Task]:
    """Share 0 takes the engine, which weighs nearly as much as all kernels; others the rest."""
    if jobs == 1:
        return tasks
    return tasks[:1] if share == 0 else tasks[share :: jobs - 1]


if __name__ == "__main__":
    sys.exit(main())
