"""Measure the time that communication adds to a training step, by nc10d and by torch over gloo.

The same model is trained three ways on the same ranks: alone, by torch's DistributedDataParallel
over gloo, by nc10d's. Steps of the three take turns. The added time is the slowest rank's, less a
step alone: by the clock, and as CPU time, which other processes hardly disturb. Ranks are started
several times, because the placement of a launch's memory in the caches changes a figure by a third.
Gradients are views of the buckets; the models are compared at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.background_load import BackgroundLoad
from benchmarks.estimates import Times, slower, turns
from nc10d.testing.ranks import Ranks

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

ALONE, TORCH, OURS = WAYS = ("alone", "torch over gloo", "nc10d")
CPU = ", CPU"
GOAL = 1 / 3
"""nc10d should add at most this share of the time that torch over gloo adds."""
LIMIT = 300.0
"""Seconds for an operation: far more than any takes."""


@dataclass(frozen=True)
class Size:
    """A stack of `layers` square linear layers of this `width`, with biases if `biased`."""

    layers: int
    width: int
    biased: bool
    samples: int

    @property
    def name(self) -> str:
        """Numbers of parameters and of tensors."""
        each = self.width * (self.width + self.biased)
        return f"{self.layers * each / 1e6:.1f} M in {self.layers * (1 + self.biased)}"


SIZES = [Size(100, 200, True, 16), Size(24, 1020, False, 16)]


def measure(group: ProcessGroup, size: Size, meeting: str, rounds: int, steps: int) -> Times:
    """Return this rank's mean seconds of a step, by way and round. Blocks for all rounds.

    CPU seconds are under the way's name with CPU appended.
    """
    import torch
    import torch.distributed as gloo

    torch.set_num_threads(1)
    meet = f"file://{meeting}"
    gloo.init_process_group("gloo", init_method=meet, rank=group.rank, world_size=group.size)
    try:
        trained = {way: _Trained(way, size, group) for way in WAYS}
        times: Times = {name: [] for way in WAYS for name in (way, way + CPU)}
        for number in range(-1, rounds):
            for way in turns(WAYS, number % len(WAYS)):
                seconds, cpu = _means(group, trained[way], steps)
                if number >= 0:  # the first round sets everything up
                    times[way].append(seconds)
                    times[way + CPU].append(cpu)
        _compare(trained[TORCH], trained[OURS])
        return times
    finally:
        gloo.destroy_process_group()


class _Trained:
    """A model in a given way, with this rank's batch."""

    def __init__(self, way: str, size: Size, group: ProcessGroup) -> None:
        import torch
        from torch import nn

        from nc10d.torch import DistributedDataParallel

        torch.manual_seed(0)
        width = size.width
        layers = [nn.Linear(width, width, bias=size.biased) for _ in range(size.layers)]
        whole = nn.Sequential(*layers)
        wrap: dict[str, Any] = {
            TORCH: nn.parallel.DistributedDataParallel,
            OURS: DistributedDataParallel,
        }
        self.model = whole if way == ALONE else wrap[way](whole, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.x = torch.randn(size.samples, width, generator=torch.Generator().manual_seed(1))
        self.x *= group.rank + 1

    def step(self) -> None:
        """Train on a batch."""
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()


def _means(group: ProcessGroup, trained: _Trained, steps: int) -> tuple[float, float]:
    """Return the mean seconds of a step, and the mean CPU seconds of this rank's threads."""
    group.barrier()
    start, spent = time.perf_counter(), time.process_time()
    for _ in range(steps):
        trained.step()
    return (time.perf_counter() - start) / steps, (time.process_time() - spent) / steps


def _compare(theirs: _Trained, ours: _Trained) -> None:
    """Raise RuntimeError unless both ways have led to the same model, up to rounding."""
    import torch

    pairs = zip(theirs.model.parameters(), ours.model.parameters(), strict=True)
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in pairs):
        raise RuntimeError("the two ways have led to different models")


def added(times: Times, way: str, kind: str = "") -> float:
    """Return the median over rounds of a way's time beyond a step alone; `kind` may be CPU."""
    pairs = zip(times[ALONE + kind], times[way + kind], strict=True)
    return statistics.median(whole - alone for alone, whole in pairs)


def line(size: Size, ranks: int, times: Times) -> str:
    """Return a row of the table: medians in ms, and ratios of the added times."""
    ratio, cpu = (added(times, OURS, kind) / added(times, TORCH, kind) for kind in ("", CPU))
    shown = statistics.median(times[ALONE]), added(times, TORCH), added(times, OURS)
    figures = " | ".join(f"{1e3 * seconds:.2f}" for seconds in shown)
    reached = "yes" if ratio <= GOAL else "no"
    return f"| {size.name} | {ranks} | {figures} | {ratio:.2f} | {cpu:.2f} | {reached} |"


HEADER = """\
| parameters | ranks | alone, ms | torch over gloo adds | nc10d adds | ratio | of CPU | <= 1/3 |
|---|---|---|---|---|---|---|---|"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks ddp", description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument(
        "--launches", type=int, default=3, help="of the ranks: where memory lies matters"
    )
    parser.add_argument("--rounds", type=int, default=5, help="in a launch (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a round (%(default)s)")
    options = parser.parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"  # for the ranks, which import NumPy anew
    print(f"# {len(os.sched_getaffinity(0))} cores\n{HEADER}", flush=True)
    for ranks in map(int, options.ranks.split(",")):
        for size in SIZES:
            with BackgroundLoad() as others:
                times = _collect(size, ranks, options)
            print(line(size, ranks, times), f" others: {others.cores:.2f} cores", flush=True)
    return 0


def _collect(size: Size, ranks: int, options: argparse.Namespace) -> Times:
    """Return the slowest rank's times of all rounds of all launches."""
    launches = [
        _launch(size, ranks, options.rounds, options.steps) for _ in range(options.launches)
    ]
    return {name: [t for times in launches for t in times[name]] for name in launches[0]}


def _launch(size: Size, count: int, rounds: int, steps: int) -> Times:
    with tempfile.TemporaryDirectory() as folder, Ranks(count, "processes", timeout=LIMIT) as ranks:
        given = (size, str(Path(folder) / "meeting"), rounds, steps)
        return slower(ranks.run(measure, *([argument] * count for argument in given)))
