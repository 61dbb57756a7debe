"""Measure the share of an asynchronous all_reduce that a matrix product hides.

Two ranks. "a core to spare": rank 0 multiplies matrices on a separate core, and all other threads
(rank 1, and rank 0's worker) share the remaining cores. "busy": both ranks multiply, and on two
cores none is spare. In each round these take turns: the all_reduce alone, the product alone, the
product while the all_reduce runs, both in sequence. Hidden is the share of the synchronous
all_reduce's time that the asynchronous call does not add to the product's. `--plot` draws an
asynchronous run of each kind by the times of the flight recorder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.background_load import BackgroundLoad
from benchmarks.estimates import Times, slower
from benchmarks.micro import timeline
from nc10d.api.calls import all_reduce
from nc10d.base.text import byte_size
from nc10d.group.process_group import ProcessGroup
from nc10d.observe import FlightRecorder
from nc10d.ops import MAX
from nc10d.testing.ranks import Ranks

SIDE = 384
"""Rows of the matrices: a product takes some milliseconds, mostly in the cache."""
LONGER = 3.0
"""Ratio of the product's time to the all_reduce's."""
SCENARIOS = ("a core to spare", "busy")
Multiply = Callable[[], object]


def place(scenario: str, rank: int) -> None:
    """Reserve a core for rank 0's caller, the rest for other threads; or all cores for all."""
    cores = sorted(os.sched_getaffinity(os.getppid()))
    spare = scenario == SCENARIOS[0] and len(cores) > 1
    for thread in map(int, os.listdir("/proc/self/task")):
        alone = rank == 0 and thread == threading.get_native_id()
        allowed = (cores[:1] if alone else cores[1:]) if spare else cores
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(thread, allowed)


def measure(group: ProcessGroup, scenario: str, nbytes: int, rounds: int) -> Times:
    """Return this rank's seconds by name and round, without the first round, a warm-up."""
    x, multiply = prepare(group, scenario, nbytes)
    cases: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(x),
        "product": multiply,
        "async": lambda: beside(x, multiply),
        "sync": lambda: (all_reduce(x), multiply()),
    }
    times: Times = {name: [] for name in cases}
    for _ in range(rounds + 1):
        x.fill(1)
        for name, call in cases.items():
            times[name].append(_timed(group, call))
    return {name: found[1:] for name, found in times.items()}


def prepare(group: ProcessGroup, scenario: str, nbytes: int) -> tuple[Any, Multiply]:
    """Place the threads; return an array, and a product LONGER times its all_reduce."""
    x = np.ones(nbytes // 4, np.float32)
    work: Any = all_reduce(x, async_op=True)  # starts the worker's thread, which place() moves
    work.wait()
    place(scenario, group.rank)
    if scenario == SCENARIOS[0] and group.rank:
        _agreed(group, x, 0.0)
        return x, lambda: None
    once = products(1)
    once()
    return x, products(_agreed(group, x, min(_timed_alone(once) for _ in range(5))))


def products(count: int) -> Multiply:
    """Return a call that multiplies two matrices `count` times."""
    a, b = (np.random.default_rng(seed).random((SIDE, SIDE), np.float32) for seed in (0, 1))
    c = np.empty_like(a)

    def multiply() -> None:
        for _ in range(count):
            np.matmul(a, b, out=c)

    return multiply


def _agreed(group: ProcessGroup, x: Any, product: float) -> int:
    """Return the number of products that last LONGER times the all_reduce, on the slowest rank."""
    longest = np.array([min(_timed(group, lambda: all_reduce(x)) for _ in range(3)), product])
    group.all_reduce(longest, MAX)
    communication, multiplication = map(float, longest)
    return max(1, round(LONGER * communication / max(multiplication, 1e-6)))


def beside(x: Any, multiply: Multiply) -> None:
    """Multiply while the all_reduce runs, and wait for it."""
    work: Any = all_reduce(x, async_op=True)
    multiply()
    work.wait()


def _timed(group: ProcessGroup, call: Callable[[], object]) -> float:
    group.barrier()
    return _timed_alone(call)


def _timed_alone(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def hidden(times: Times) -> float:
    """Return the share of the all_reduce that the product hides, from medians; 1 is all of it."""
    medians = {name: statistics.median(found) for name, found in times.items()}
    return 1 - (medians["async"] - medians["product"]) / medians["all_reduce"]


def report(times: Times) -> str:
    """Return a line: medians in ms, the hidden share, and async's time over sync's."""
    medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    shown = ", ".join(f"{name} {value:.1f}" for name, value in medians.items())
    ratio = statistics.median(a / s for a, s in zip(times["async"], times["sync"], strict=True))
    return f"{shown} ms; hidden {100 * hidden(times):.0f} %; async/sync {ratio:.2f}"


def trace(group: ProcessGroup, scenario: str, nbytes: int) -> timeline.RankTimes:
    """Run the product beside the all_reduce once more; return the times of caller and engine."""
    x, multiply = prepare(group, scenario, nbytes)
    group.barrier()
    marks = [time.monotonic_ns()]
    work: Any = all_reduce(x, async_op=True)
    marks.append(time.monotonic_ns())
    multiply()
    marks.append(time.monotonic_ns())
    work.wait()
    marks.append(time.monotonic_ns())
    call = FlightRecorder(group).entries()[-1]
    return timeline.RankTimes(marks, (call.begun, call.ended))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print, and draw if asked to. Blocks for all rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks overlap", description=__doc__)
    parser.add_argument("--bytes", type=byte_size, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plot", type=Path, help="draw the timelines into this PNG file")
    options = parser.parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"  # for the ranks, which import NumPy anew
    print(f"# 2 ranks on {len(os.sched_getaffinity(0))} cores, {options.bytes} bytes", flush=True)
    drawn = {}
    for scenario in SCENARIOS:
        given = [[scenario] * 2, [options.bytes] * 2]
        with BackgroundLoad() as others, Ranks(2, "processes", timeout=120.0) as ranks:
            found = ranks.run(measure, *given, [options.rounds] * 2)
            drawn[scenario] = ranks.run(trace, *given) if options.plot else []
        load = f"others used {others.cores:.2f} cores"
        print(f"{scenario}: {report(slower(found))}; {load}", flush=True)
    if options.plot:
        timeline.draw(drawn, options.plot)
    return 0
