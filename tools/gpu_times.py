"""The rows of tools/gpu_check.py that are times: blocks, packing, and bandwidth, beside torch's.

tools/gpu_torch.py measures torch in a process of its own, on the same card in the same run. It is a
failure if torch is installed with CUDA and can't be measured.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import device_ranks as on
import numpy as np
from gpu_rows import Row

from benchmarks.micro import flatten
from nc10d import cuda
from nc10d.backend.nccl.works import NcclWork
from nc10d.cuda.driver import call
from nc10d.group.process_group import ProcessGroup
from nc10d.reducer.device_packing import DevicePacker
from nc10d.testing.ranks import Ranks

TIMEOUT = 60.0
Way = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """The sizes and repetitions of the measurements."""

    arrays: int = 64
    nbytes: int = 8 << 20
    rounds: int = 20
    tensors: int = 160
    bucket: int = 25 << 20


QUICK = Size(arrays=4, nbytes=1 << 12, rounds=2, tensors=8, bucket=1 << 16)
"""The smallest sizes that run all code."""


def timed(name: str, way: Way, finish: Way, rounds: int, moved: int = 0) -> Row:
    """Return a row: median time until the call returns, and until the device has finished.

    With `moved` bytes, the row also has the bandwidth.
    """
    way()
    finish()
    host, device = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        way()
        returned = time.perf_counter()
        finish()
        host.append(returned - begin)
        device.append(time.perf_counter() - begin)
    cpu, whole = (1e6 * statistics.median(times) for times in (host, device))
    figures = {"cpu_us": cpu, "us": whole}
    text = f"{cpu:9.1f} us of CPU, {whole:9.1f} us in all"
    if moved:
        figures["gb_s"] = moved / whole / 1e3
        text += f", {figures['gb_s']:7.1f} GB/s"
    return Row(name, text, figures=figures)


def ratio(rows: Sequence[Row], name: str, ours: str, theirs: str, figure: str) -> list[Row]:
    """Return a row with the ratio of two rows' figures; an empty list if a row is missing."""
    values = {row.name: row.figures[figure] for row in rows if figure in row.figures}
    if ours not in values or theirs not in values:
        return []
    share = values[ours] / values[theirs]
    return [Row(name, f"{share:9.2f}", figures={"ratio": share})]


def blocks(size: Size) -> list[Row]:
    """Time all_reduce of many arrays by NCCL in a group of a single rank, a thread here."""
    with Ranks(1, "threads", "nccl", TIMEOUT) as ranks:
        return ranks.run(block_ways, [size])[0]


def block_ways(group: ProcessGroup, size: Size) -> list[Row]:
    """Time single calls, a coalesced block, a plan, flattened arrays, and an array that is flat."""
    count = size.nbytes // 4
    xs = [cuda.to_device(np.ones(count, np.float32), on.device(group)) for _ in range(size.arrays)]
    flat = cuda.to_device(np.ones(size.arrays * count, np.float32), on.device(group))
    packer = DevicePacker(xs, flat, [count * index for index in range(size.arrays)])

    def one_by_one() -> None:
        for x in xs:
            group.all_reduce(x)

    def coalesced() -> None:
        with group.coalescing_manager():
            one_by_one()

    def flattened() -> None:
        packer.pack()
        group.all_reduce(flat)
        packer.unpack()

    with group.coalescing_manager() as manager:
        one_by_one()
    ways: dict[str, Way] = {
        "one by one": one_by_one,
        "coalesced": coalesced,
        "as a plan": manager.plan().launch,
        "flattened and back": flattened,
        "one flat array": lambda: group.all_reduce(flat),
    }
    return [
        timed(f"  nc10d, {name}", way, cuda.synchronize, size.rounds) for name, way in ways.items()
    ]


def packing(size: Size) -> list[Row]:
    """Pack and unpack a bucket by the kernels, verify, and time them beside a plain copy."""
    with cuda.on_device(0):
        return pack_ways(size)


def pack_ways(size: Size) -> list[Row]:
    """Return the rows of `packing`, on this thread's current device."""
    sizes = flatten.counts(size.tensors, size.bucket // 4)
    generators = map(np.random.default_rng, range(len(sizes)))
    values = [
        rng.normal(size=n).astype(np.float32) for rng, n in zip(generators, sizes, strict=True)
    ]
    flat, other = cuda.empty(sum(sizes)), cuda.empty(sum(sizes))
    arrays = [cuda.to_device(x) for x in values]
    packer = DevicePacker(arrays, flat, np.cumsum([0, *sizes[:-1]]).tolist())
    packer.pack(0.5)
    packer.unpack(2.0)
    cuda.synchronize()
    wrong = int(np.count_nonzero(flat.to_host() != np.concatenate(values) * np.float32(0.5)))
    wrong += sum(
        int(np.count_nonzero(x.to_host() != y)) for x, y in zip(arrays, values, strict=True)
    )
    copy = ("cuMemcpyDtoDAsync", other.address, flat.address, flat.nbytes, cuda.stream_of(flat))
    ways: dict[str, Way] = {
        "  one copy": lambda: call(*copy),
        "  nc10d, pack": packer.pack,
        "  nc10d, pack scaled": lambda: packer.pack(0.5),
        "  nc10d, unpack": packer.unpack,
    }
    moved = 2 * flat.nbytes
    rows = [Row("packed and unpacked elements", f"{wrong} wrong", failed=bool(wrong))]
    rows += [
        timed(name, often(way), cuda.synchronize, size.rounds, 10 * moved)
        for name, way in ways.items()
    ]
    share = "  pack's share of the copy's bandwidth (aim 0.9)"
    return rows + ratio(rows, share, "  nc10d, pack", "  one copy", "gb_s")


def often(way: Way, times: int = 10) -> Way:
    """Return a function that calls `way` ten times without waiting for the device in between."""

    def again() -> None:
        for _ in range(times):
            way()

    return again


def torch_rows(size: Size) -> list[Row]:
    """Return torch's times for blocks and packing; with CUDA, an error is a failure."""
    if importlib.util.find_spec("torch") is None:
        return [Row("  torch", "not run: torch is not installed")]
    script = Path(__file__).with_name("gpu_torch.py")
    command = [sys.executable, str(script), *map(str, astuple(size))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        error = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return [Row("  torch", error, failed=True)]
    return [Row(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def beside(size: Size) -> list[Row]:
    """Return blocks and packing by nc10d and by torch, and their ratios."""
    rows = [*blocks(size), *packing(size), *torch_rows(size)]
    pairs = [
        ("  CPU time of a block, of torch's (aim 0.25)", "coalesced", "coalesced", "cpu_us"),
        ("  time of a block, of torch's", "coalesced", "coalesced", "us"),
        ("  time of a pack, of _foreach_copy_'s", "pack", "_foreach_copy_", "us"),
        ("  time of a pack, of _flatten_dense_tensors'", "pack", "_flatten_dense_tensors", "us"),
    ]
    for name, ours, theirs, figure in pairs:
        rows += ratio(rows, name, f"  nc10d, {ours}", f"  torch, {theirs}", figure)
    return rows


def bandwidth(size: Size) -> list[Row]:
    """Measure the bus bandwidth of all_reduce over all cards, as nccl-tests defines it."""
    count = cuda.device_count()
    if count < 2:
        return [Row("  all_reduce of all cards", "not run: one card only")]
    with Ranks(count, "processes", "nccl", TIMEOUT) as ranks:
        return ranks.run(rates, [size] * count)[0]


def rates(group: ProcessGroup, size: Size) -> list[Row]:
    """Return a row for each number of bytes."""
    with cuda.on_device(on.device(group)):
        return [rate(group, size.nbytes * factor // 8, size.rounds) for factor in (1, 16, 256)]


def rate(group: ProcessGroup, nbytes: int, rounds: int) -> Row:
    """Time separate all_reduce calls, on this thread's current device."""
    x = cuda.to_device(np.ones(nbytes // 4, np.float32), on.device(group))
    times = []
    for _ in range(rounds):
        group.barrier()
        begin = time.perf_counter()
        work = group.all_reduce(x, async_op=True)
        assert isinstance(work, NcclWork)
        work.wait_blocking()
        times.append(time.perf_counter() - begin)
    bus = 2 * (group.size - 1) / group.size * x.nbytes / statistics.median(times) / 1e9
    name = f"  all_reduce of {nbytes >> 20} MiB, {group.size} cards"
    return Row(name, f"{bus:.1f} GB/s", figures={"gb_s": bus})
