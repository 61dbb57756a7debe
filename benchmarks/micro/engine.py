"""Measure the cost of a call at each level, from engine to API.

Two rank processes; each figure is the median over rounds of the mean time of a call, in µs. Where
torch is installed, a tensor's cost beyond an ndarray's is measured, too.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np

from nc10d.api.calls import all_reduce
from nc10d.api.queries import coalescing_manager
from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AllReduce
from nc10d.testing.ranks import Ranks

ROUNDS = 15
Figures = dict[str, float]


def timed(group: ProcessGroup, call: Callable[[], object], calls: int) -> float:
    """Return the median over rounds of the mean µs of a call; all ranks call together."""
    return statistics.median(_mean(group, call, calls) for _ in range(ROUNDS))


def _mean(group: ProcessGroup, call: Callable[[], object], calls: int) -> float:
    group.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def floors(group: ProcessGroup) -> Figures:
    """Measure an 8-byte all_reduce by the engine, the backend, the group and the API."""
    backend: Any = group.backend("cpu")
    x = np.ones(2, np.float32)
    op = AllReduce(x)
    group.all_reduce(x)
    prepared = backend.launcher.latest[AllReduce][op.op].words
    return {
        "engine": timed(group, lambda: _bare(prepared, x), 2000),
        "backend.launch": timed(group, lambda: backend.launch((op,), 60.0, False), 2000),
        "group.all_reduce": timed(group, lambda: group.all_reduce(x), 2000),
        "nc10d.all_reduce": timed(group, lambda: all_reduce(x), 2000),
        "async, then wait": timed(group, lambda: _wait(all_reduce(x, async_op=True)), 500),
        "send and recv, one way": timed(group, lambda: _ping_pong(group, x), 500) / 2,
    }


def _bare(prepared: Any, x: Any) -> None:
    while plain.run_prepared(prepared, x, x) == at.NEW_SITE:
        call_sites.learn()


def _wait(work: Any) -> None:
    work.wait()


def _ping_pong(group: ProcessGroup, x: Any) -> None:
    if group.rank == 0:
        group.send(x, 1)
        group.recv(x, 1)
    else:
        group.recv(x, 0)
        group.send(x, 0)


def blocks(group: ProcessGroup) -> Figures:
    """Measure 64 all_reduces of 1 KiB in a coalescing block: new arrays, the same, a plan."""
    arrays = [np.ones(256, np.float32) for _ in range(64)]

    def block(some: Sequence[Any]) -> Any:
        with coalescing_manager(group) as batch:
            for x in some:
                group.all_reduce(x)
        return batch

    plan = block(arrays).plan()
    return {
        "64 x 1 KiB, new arrays": _new_arrays(group, block),
        "64 x 1 KiB, the same again": timed(group, lambda: block(arrays), 50),
        "64 x 1 KiB, plan.launch()": timed(group, plan.launch, 100),
        "of which Python": _python_of(group, plan.launch, 100),
    }


def _python_of(group: ProcessGroup, call: Callable[[], object], calls: int) -> float:
    """Return the median over rounds of the mean µs of a call outside compiled code.

    They include two timers around each entry into compiled code.
    """
    inside = [0.0]

    def clocked(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            answer = compiled(*arguments)
            inside[0] += time.perf_counter() - start
            return answer

        return run

    rounds = []
    with (
        mock.patch.object(entry_points, "run", clocked(entry_points.run)),
        mock.patch.object(plain, "same_arrays", clocked(plain.same_arrays)),
    ):
        for _ in range(ROUNDS):
            inside[0] = 0.0
            whole = _mean(group, call, calls)
            rounds.append(whole - inside[0] * 1e6 / calls)
    return statistics.median(rounds)


def tensors(group: ProcessGroup) -> Figures:
    """Measure the same all_reduce of a torch tensor and of an ndarray, in turns."""
    torch = importlib.import_module("torch")
    importlib.import_module("nc10d.torch")
    x, tensor = np.ones(2, np.float32), torch.ones(2)
    calls: list[Callable[[], object]] = [lambda: all_reduce(x), lambda: all_reduce(tensor)]
    rounds = [[_mean(group, call, 2000) for call in calls] for _ in range(ROUNDS)]
    return {
        "of a torch tensor": statistics.median(theirs for _, theirs in rounds),
        "more than of an ndarray": statistics.median(theirs - ours for ours, theirs in rounds),
    }


def _new_arrays(group: ProcessGroup, block: Callable[[Any], Any]) -> float:
    times = []
    for _ in range(100):
        fresh = [np.ones(256, np.float32) for _ in range(64)]
        group.barrier()
        start = time.perf_counter()
        block(fresh)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure on two ranks and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine", description=__doc__)
    parser.parse_args(arguments)
    print(f"# 2 ranks on {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.2f}")
    with Ranks(2, "processes", timeout=60.0) as ranks:
        for measure in (floors, blocks, *([tensors] if find_spec("torch") else [])):
            for name, value in ranks.run(measure)[0].items():
                print(f"{name:<30}{value:>10.2f} us", flush=True)
    return 0
