"""`python -m nc10d.warmup`: compile everything now, so that later first uses only load the results.

Compiles the CPU engine, every kernel and NCCL's loop into the cache folder (see
`nc10d.kernels.cache_dir`). Two processes share the work if there are two cores. Progress is shown
as a bar on a terminal if rich is installed, else in lines. A second run loads the cache and takes a
second or two. `--import my_job.reductions` also compiles the `@nc10d.reduction`s in that module.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nc10d.base.deadline import monotonic
from nc10d.kernels.cache_dir import distrust, make_folder
from nc10d.run.signals import run_interruptible

NATIVE = "nc10d.backend.cpu.native"
_PREPARED = ("prepared_calls", "prepared_messages", "prepared_exchange", "hooked_calls")
_PARTS = ("entry_points", "ring", *_PREPARED, "tcp_streams", "sockets")
_OBJECTS = "nc10d.codec.opcodes", "nc10d.codec.compiled_openings"
ENGINE = (*(f"{NATIVE}.{name}" for name in _PARTS), *_OBJECTS)
"""Modules with functions to compile; `tcp_streams` and `sockets` are for jobs of several hosts."""
LOOPS = ("native", "entering")
"""Modules that compile a function each when they are imported, without CUDA or NCCL."""
LINES = 5
"""Lines that show the progress if there is no bar."""
Task = tuple[str, Callable[[], object]]
Show = Callable[[int, int], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile every function; return the number of processes that failed. Blocks until the end."""
    options = _parse(arguments)
    if options.share is not None:
        _compile(options.share, options.jobs, options.imports)
        return 0
    if options.to is not None:
        os.environ["NC10D_CACHE_DIR"] = str(options.to)  # for the helpers
    started = monotonic()
    with _helpers(options.jobs, options.imports) as (helpers, lines), _progress() as show:
        count = follow(lines, options.jobs, show)
        failed = sum(helper.wait() != 0 for helper in helpers)
    if options.to is not None:
        let_all_read(options.to)
    if not failed:
        print(f"{count} functions ready in {monotonic() - started:.1f} s", flush=True)
    return failed


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nc10d.warmup", description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=min(2, cores), help="processes to use")
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="fill DIR, readable by all users, for an image of a container; programs there use it "
        "with NC10D_CACHE_DIR=DIR, on the same kind of CPU, also where it is read-only",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="also compile the reductions that importing MODULE makes; may be repeated",
    )
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    problem = options.to and (make_folder(options.to) or distrust(options.to.resolve()))
    if problem:
        parser.error(f"--to: {problem}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    return options


def let_all_read(folder: Path) -> None:
    """Let every user read what `folder` holds; only the owner may write."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


# The parent process starts the helpers and counts their reports.


@contextlib.contextmanager
def _helpers(
    jobs: int, imports: Sequence[str]
) -> Iterator[tuple[list[subprocess.Popen[bytes]], Iterable[str]]]:
    """Start the helper processes, which compile; yield them and the lines that they write."""
    # All helpers write to the same pipe, a line at a time. They are outside the terminal's
    # foreground group, so Ctrl-C reaches only this process, which then kills them.
    read_end, write_end = os.pipe()
    modules = [f"--import={module}" for module in imports]
    command = [sys.executable, "-m", "nc10d.warmup", "--jobs", str(jobs), *modules, "--share"]
    started = [
        subprocess.Popen([*command, str(share)], stdout=write_end, process_group=0)
        for share in range(jobs)
    ]
    os.close(write_end)
    try:
        with open(read_end) as lines:
            yield started, lines
    finally:
        for helper in started:
            helper.kill()
            helper.wait()


def follow(lines: Iterable[str], jobs: int, show: Show) -> int:
    """Show the progress that the helpers report; return the number of compiled functions."""
    # Nothing is shown before each of the `jobs` helpers has reported the number of its functions.
    ready = total = started = 0
    for line in lines:
        if line.startswith("+"):
            total += int(line)
            started += 1
        else:
            ready += 1
        if started == jobs:
            show(ready, total)
    return ready


@contextlib.contextmanager
def _progress() -> Iterator[Show]:
    """Yield a function that shows (ready, total), as a bar or in lines."""
    rich: Any = None
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            rich = importlib.import_module("rich.progress")
    if rich is None:
        yield in_lines()
        return
    with rich.Progress() as progress:
        bar = progress.add_task("compiling")
        yield lambda ready, total: progress.update(bar, completed=ready, total=total)


def in_lines() -> Show:
    """Return a function that prints LINES lines, spread evenly."""
    printed = 0

    def show(ready: int, total: int) -> None:
        nonlocal printed
        if ready * LINES // max(total, 1) > printed:
            printed = ready * LINES // total
            print(f"{ready} of {total} functions", flush=True)

    return show


# A helper process compiles a share of the functions.


def _compile(share: int, jobs: int, imports: Sequence[str]) -> None:
    """Compile the tasks of this share; write their number first, then the name of each task."""
    logging.getLogger("nc10d").setLevel(logging.ERROR)  # the user has asked for compilation
    modules = [(name, partial(importlib.import_module, name)) for name in imports]
    own = deal([*tasks(), *modules], share, jobs)
    _write_line(f"+{len(own)}")
    for name, compile_it in own:
        compile_it()
        _write_line(name)


def _write_line(line: str) -> None:
    """Write a line in a single write; print() may write the newline apart into the shared pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tasks() -> list[Task]:
    """Return every function to compile; the engine, which takes longest, comes first."""
    from nc10d.kernels import copy, pack, reduce, streaming
    from nc10d.kernels.exact import exact_sums

    carriers = [*pack.every_kernel(), *streaming.every_kernel(), *copy.every_kernel()]
    kernels = [*reduce.every_kernel(), *carriers, *exact_sums.every_kernel()]
    nccl = "nc10d.backend.nccl.bindings."
    loops = [(f"nccl {name}", partial(importlib.import_module, nccl + name)) for name in LOOPS]
    return [("engine", _warm_engine), *kernels, *loops]


def _warm_engine() -> None:
    from nc10d.backend.cpu.native import interpreter, raw_calls, slow_steps
    from nc10d.codec import compiled_openings
    from nc10d.kernels import cache

    interpreter.advance_address()
    for name in ENGINE:
        importlib.import_module(name)
        for _, make in cache.every(name):
            make()
    slow_steps.prepare()
    raw_calls.raw_call_address()
    compiled_openings.prepare()


def deal(every: list[Task], share: int, jobs: int) -> list[Task]:
    """Return a share's tasks: the engine, nearly half the work, for share 0."""
    if jobs == 1:
        return every
    return every[:1] if share == 0 else every[share :: jobs - 1]


if __name__ == "__main__":
    sys.exit(run_interruptible(main))
