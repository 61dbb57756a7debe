"""`python -m nc10d.warmup`: compile everything now, so that later first uses only load it.

Compiles the CPU engine, every kernel and NCCL's loop into the cache folder (see
`nc10d.kernels.cache_dir`), by two processes side by side where there are two cores, and shows how
far
it is: with a bar on a terminal where rich is installed, else in lines. Running it again costs a
second or two.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from nc10d.run.interrupt import run_interruptible

NATIVE = "nc10d.backend.cpu.native"
ENGINE = tuple(
    f"{NATIVE}.{name}"
    for name in (
        "entry_points",
        "ring",
        "prepared_calls",
        "prepared_messages",
        "tcp_streams",
        "net",
    )
)
"""What has functions to compile, at once or on demand; the last two for jobs of several hosts."""
LOOP = "nc10d.backend.nccl.bindings.native"
"""Compiles its one function when it is imported; that needs neither CUDA nor NCCL."""
LINES = 5
"""How many lines tell of the progress where there is no bar."""
Task = tuple[str, Callable[[], object]]
Show = Callable[[int, int], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile all there is; return the number of processes that failed. Blocks until the end."""
    options = _parse(arguments)
    if options.share is not None:
        _compile(options.share, options.jobs)
        return 0
    started = time.perf_counter()
    with _helpers(options.jobs) as (helpers, words), _progress() as show:
        count = _follow(words, options.jobs, show)
        failed = sum(helper.wait() != 0 for helper in helpers)
    if not failed:
        print(f"{count} functions ready in {time.perf_counter() - started:.1f} s", flush=True)
    return failed


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nc10d.warmup", description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=min(2, cores), help="processes to use")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    return options


# Here processes are started, and what they say is counted.


@contextlib.contextmanager
def _helpers(jobs: int) -> Iterator[tuple[list[subprocess.Popen[bytes]], Iterable[str]]]:
    """Start the processes that compile; yield them, and the lines that they write until they end.

    All write to one pipe, a line at a time. They are out of the terminal's foreground, so that
    Ctrl-C is this process's, which ends them.
    """
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "nc10d.warmup", "--jobs", str(jobs), "--share"]
    started = [
        subprocess.Popen([*command, str(share)], stdout=writing, process_group=0)
        for share in range(jobs)
    ]
    os.close(writing)
    try:
        with open(reading) as words:
            yield started, words
    finally:
        for helper in started:
            helper.kill()
            helper.wait()


def _follow(words: Iterable[str], jobs: int, show: Show) -> int:
    """Show how many functions are ready of how many, as helpers say so; return how many.

    Nothing is shown before each of the `jobs` helpers has said how many it has.
    """
    ready = total = told = 0
    for word in words:
        if word.startswith("+"):
            total += int(word)
            told += 1
        else:
            ready += 1
        if told == jobs:
            show(ready, total)
    return ready


@contextlib.contextmanager
def _progress() -> Iterator[Show]:
    """Yield what shows (ready, total): a bar, or some lines."""
    rich = _rich() if sys.stdout.isatty() else None
    if rich is None:
        yield _in_lines()
        return
    with rich.Progress() as progress:
        bar = progress.add_task("compiling")
        yield lambda ready, total: progress.update(bar, completed=ready, total=total)


def _rich() -> Any:
    try:
        return importlib.import_module("rich.progress")
    except ImportError:
        return None


def _in_lines() -> Show:
    told = 0

    def show(ready: int, total: int) -> None:
        nonlocal told
        if ready * LINES // max(total, 1) > told:
            told = ready * LINES // total
            print(f"{ready} of {total} functions", flush=True)

    return show


# Here functions are compiled.


def _compile(share: int, jobs: int) -> None:
    """Compile the tasks of this share; write how many there are, then each one's name."""
    logging.getLogger("nc10d").setLevel(logging.ERROR)  # that it compiles is no news here
    mine = _deal(_tasks(), share, jobs)
    _say(f"+{len(mine)}")
    for name, make in mine:
        make()
        _say(name)


def _say(word: str) -> None:
    """Write a line in one piece: the pipe is shared, and print() may write its end apart."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def _tasks() -> list[Task]:
    """Return every function to compile; the engine comes first because it takes longest."""
    from nc10d.kernels import copy, pack, reduce, streaming

    carriers = [*pack.every_kernel(), *streaming.every_kernel(), *copy.every_kernel()]
    kernels = [*reduce.every_kernel(), *carriers]
    return [("engine", _warm_engine), *kernels, ("nccl", partial(importlib.import_module, LOOP))]


def _warm_engine() -> None:
    from nc10d.backend.cpu.native import interpreter, slow_steps
    from nc10d.kernels import lazy

    interpreter.advance_address()
    for name in ENGINE:
        importlib.import_module(name)
        for _, make in lazy.every(name):
            make()
    slow_steps.prepare()


def _deal(tasks: list[Task], share: int, jobs: int) -> list[Task]:
    """Share 0 takes the engine, which weighs nearly as much as all kernels; others the rest."""
    if jobs == 1:
        return tasks
    return tasks[:1] if share == 0 else tasks[share :: jobs - 1]


if __name__ == "__main__":
    sys.exit(run_interruptible(main))
