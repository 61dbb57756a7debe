"""Measure a training step and its peak memory in modes that save bits or memory, beside torch's.

Modes: plain; mixed precision in bfloat16; the optimizer in the backward pass. torch's
DistributedDataParallel has the last two on GPUs alone. Here it works over gloo with what a program
has instead: autocast to bfloat16, and an optimizer after the backward pass. Adam steps each of the
parameters, so gradients are a quarter of a job's state. Each way has processes of its own: a
process never gives all of its memory back. Its peak is the most that it has beyond what it had
before the model, of memory without a file and of shared memory: a page that several ranks use
counts once, divided among them (Pss of smaps_rollup, a sample every few milliseconds).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.background_load import BackgroundLoad
from benchmarks.micro.ddp import LIMIT, Size
from nc10d.testing.ranks import Ranks

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

TORCH, OURS = "torch over gloo", "nc10d"
PLAIN, MIXED, INSIDE = MODES = ("plain", "mixed precision", "optimizer in backward")
SIZE = Size(24, 1020, False, 16)


def measure(
    group: ProcessGroup, size: Size, way: str, mode: str, meeting: str, steps: int
) -> tuple[float, float]:
    """Return the median seconds of a step, and the MiB that the training needs at its peak."""
    import torch
    import torch.distributed as gloo

    torch.set_num_threads(1)
    meet = f"file://{meeting}"
    gloo.init_process_group("gloo", init_method=meet, rank=group.rank, world_size=group.size)
    before = memory()
    trained = _Trained(size, way, mode, group)
    for _ in range(3):  # optimizers have their state, buckets their order
        trained.step()
    times = []
    for _ in range(steps):
        group.barrier()
        start = time.perf_counter()
        trained.step()
        times.append(time.perf_counter() - start)
    with Peak() as peak:  # not of the timed steps, which sampling would slow
        for _ in range(steps):
            trained.step()
    gloo.destroy_process_group()
    return statistics.median(times), peak.most - before


def memory() -> float:
    """Return this process's part of the memory that it uses, without files, in MiB."""
    rows = map(str.split, Path("/proc/self/smaps_rollup").read_text().splitlines())
    return sum(int(row[1]) for row in rows if row[0] in ("Pss_Anon:", "Pss_Shmem:")) / 1024


class Peak:
    """A block with a thread that samples `memory`; `most` is its peak."""

    def __init__(self) -> None:
        self.most = memory()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, memory())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class _Trained:
    """A model in a given way and mode, with this rank's batch."""

    def __init__(self, size: Size, way: str, mode: str, group: ProcessGroup) -> None:
        import torch
        from torch import nn

        import nc10d.torch

        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Linear(size.width, size.width, bias=size.biased) for _ in range(size.layers))
        )
        inside = mode == INSIDE and way == OURS
        if inside:
            adam = {"lr": 1e-4}
            nc10d.torch.apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), adam)
        low = nc10d.torch.MixedPrecision(torch.bfloat16) if mode == MIXED else None
        wrap: dict[str, Any] = {
            TORCH: nn.parallel.DistributedDataParallel,
            OURS: nc10d.torch.DistributedDataParallel,
        }
        options = {"mixed_precision": low} if way == OURS else {}
        self.model = wrap[way](model, gradient_as_bucket_view=True, **options)
        self.optimizers = [] if inside else [torch.optim.Adam(model.parameters(), 1e-4)]
        self.x = torch.randn(size.samples, size.width) * (group.rank + 1)
        casts = mode == MIXED and way == TORCH
        self.context = torch.autocast("cpu", torch.bfloat16) if casts else contextlib.nullcontext()

    def step(self) -> None:
        """Train on a batch."""
        with self.context:
            loss = self.model(self.x).float().square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()


HEADER = f"""\
{SIZE.name} parameters, Adam
| mode | ranks | torch over gloo, ms | nc10d, ms | ratio | torch over gloo, MiB | nc10d, MiB |
|---|---|---|---|---|---|---|"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all launches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks ddp-modes", description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--launches", type=int, default=3, help="of the ranks (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="in a launch (%(default)s)")
    options = parser.parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"  # for the ranks, which import NumPy anew
    print(f"# {len(os.sched_getaffinity(0))} cores\n{HEADER}", flush=True)
    for ranks in map(int, options.ranks.split(",")):
        for mode in MODES:
            with BackgroundLoad() as others:
                found = {way: _median(way, mode, ranks, options) for way in (TORCH, OURS)}
            print(_line(mode, ranks, found), f" others: {others.cores:.2f} cores", flush=True)
    return 0


def _line(mode: str, ranks: int, found: dict[str, tuple[float, float]]) -> str:
    (theirs, their_peak), (ours, our_peak) = found[TORCH], found[OURS]
    times = f"{1e3 * theirs:.1f} | {1e3 * ours:.1f} | {ours / theirs:.2f}"
    return f"| {mode} | {ranks} | {times} | {their_peak:.0f} | {our_peak:.0f} |"


def _median(way: str, mode: str, count: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return the slowest rank's time and the largest peak: the medians of all launches."""
    launches = [_launch(SIZE, way, mode, count, options.steps) for _ in range(options.launches)]
    times, peaks = zip(*launches, strict=True)
    return statistics.median(times), statistics.median(peaks)


def _launch(size: Size, way: str, mode: str, count: int, steps: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder, Ranks(count, "processes", timeout=LIMIT) as ranks:
        given = (size, way, mode, str(Path(folder) / "meeting"), steps)
        found = ranks.run(measure, *([argument] * count for argument in given))
    times, peaks = zip(*found, strict=True)
    return max(times), max(peaks)
