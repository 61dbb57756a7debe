"""Run what is claimed about GPUs on this machine's: see tools/gpu_check.sh.

A row is a name, what came out ("ok", a figure, or what went wrong), and whether that is a failure.
A row that this machine can't have (one GPU, no torch) says why; it is no failure.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import device_ranks as on
import numpy as np
import test_nccl_conformance as conformance
import through_device
from test_nccl_device import LAWS

import nc10d as dist
from nc10d import cuda
from nc10d.backend.nccl.library import dotted, library
from nc10d.backend.nccl.works import NcclWork
from nc10d.backend.registry import find_backend, register_backend
from nc10d.bench import flatten
from nc10d.cuda.driver import call
from nc10d.errors import UnsupportedPlatform
from nc10d.group import ProcessGroup
from nc10d.reducer.device_packing import DevicePacker
from nc10d.testing.ranks import Ranks

RESULTS = Path("gpu-results.json")
TIMEOUT = 60.0
BLOCK, MIB = 64, 8
ROUNDS = 20


class Row(NamedTuple):
    """One line of the table."""

    name: str
    result: str
    failed: bool = False


def main() -> int:
    """Run all rows; return how many have failed."""
    rows = [Row("machine", machine())]
    count = cuda.device_count()
    checks: list[tuple[str, Callable[[], Sequence[Row]]]] = [
        ("conformance, 1 rank", lambda: conforms(1)),
        ("conformance, 2 ranks", lambda: conforms(2)),
        ("laws of streams, blocks and graphs, 2 ranks", laws),
        (f"{BLOCK} x {MIB} MiB, 1 rank", lambda: Ranks(1, "processes", "nccl").run(blocks)[0]),
        (f"{BLOCK} x {MIB} MiB by torch, 1 rank", torch_blocks),
        ("packing, 25 MiB of 160 tensors", packing),
        ("bus bandwidth", lambda: bandwidth(count)),
    ]
    for name, check in checks:
        rows += run(name, check)
        show(rows[-1])
    keep(rows)
    for row in rows:
        show(row)
    return sum(row.failed for row in rows)


def run(name: str, check: Callable[[], Sequence[Row]]) -> list[Row]:
    """Return a check's rows; whatever it raises is a failure."""
    begin = time.monotonic()
    try:
        rows = list(check())
    except Exception as error:  # noqa: BLE001  (the table is the report)
        traceback.print_exc()
        rows = [Row(name, f"{type(error).__name__}: {error}".splitlines()[0], failed=True)]
    return [*rows, Row(f"  time of {name}", f"{time.monotonic() - begin:.1f} s")]


def show(row: Row) -> None:
    """Print one line."""
    print(f"{'FAIL' if row.failed else '    '} {row.name:48} {row.result}", flush=True)


def keep(rows: Sequence[Row]) -> None:
    """Write the table to a file."""
    found = {"date": time.strftime("%Y-%m-%d"), "rows": [row._asdict() for row in rows]}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def machine() -> str:
    """Say which card, driver and versions these are."""
    name = call("cuDeviceGetName", 96, call("cuDeviceGet", 0)).partition(b"\0")[0].decode()
    driver = int(call("cuDriverGetVersion"))
    commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True)
    return (
        f"{cuda.device_count()} x {name}, CUDA {driver // 1000}.{driver % 1000 // 10}, "
        f"NCCL {dotted(library().version)}, Python {platform.python_version()}, "
        f"nc10d {commit.stdout.strip()}"
    )


def conforms(size: int) -> list[Row]:
    """Hold the backend to the suite for all backends; several ranks may share the card."""
    register_once()
    count, wrong = conformance.complaints(size, conformance.FEW)
    rows = [Row(f"conformance, {size} ranks", f"{count} checks", failed=bool(wrong))]
    return rows + [Row("  " + text, "wrong", failed=True) for text in wrong[:10]]


def packing() -> list[Row]:
    """Pack a bucket by the kernel, compare, and tell how fast memory was read and written."""
    sizes = flatten.counts()
    values = [
        np.random.default_rng(i).normal(size=n).astype(np.float32) for i, n in enumerate(sizes)
    ]
    flat = cuda.empty(sum(sizes))
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    packer = DevicePacker([cuda.to_device(x) for x in values], flat, offsets)
    try:
        packer.pack(0.5)
    except UnsupportedPlatform as error:
        return [Row("packing, 25 MiB of 160 tensors", str(error))]
    cuda.synchronize()
    wrong = int(np.count_nonzero(flat.to_host() != np.concatenate(values) * np.float32(0.5)))
    packer.pack()  # compiles
    cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(100):
        packer.pack()
    cuda.synchronize()
    seconds = (time.perf_counter() - begin) / 100
    told = f"{wrong} wrong; {seconds * 1e6:.1f} us, {2 * flat.nbytes / seconds / 1e12:.2f} TB/s"
    return [Row("packing, 25 MiB of 160 tensors", told, failed=bool(wrong))]


def register_once() -> None:
    """Make the backend for arrays in host memory known to this process."""

    try:
        find_backend("through-device")
    except ValueError:
        register_backend("through-device", through_device.make)


def laws() -> list[Row]:
    """Run each law in a group of its own."""
    rows = []
    with Ranks(2, "processes", "cpu:cpu,cuda:nccl", timeout=TIMEOUT) as ranks:
        ranks.run(on.be_a_host_of_ones_own)
        for law in LAWS:
            try:
                ranks.run(in_its_own_group, [law] * 2)
                rows.append(Row(law.__name__, "ok"))
            except Exception as error:  # noqa: BLE001  (the others are run all the same)
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                rows.append(Row(law.__name__, text, failed=True))
    return rows


def in_its_own_group(group: ProcessGroup, law: Callable[[ProcessGroup], None]) -> None:
    """Run a law where nothing was told to the store before."""
    mine = dist.new_group(range(group.size))
    assert isinstance(mine, ProcessGroup)
    law(mine)
    dist.destroy_process_group(mine)


def blocks(group: ProcessGroup) -> list[Row]:
    """Time 64 arrays one by one, coalesced, kept as a plan, and as one flat array."""
    count = MIB * 2**20 // 4
    xs = [cuda.to_device(np.ones(count, np.float32), on.device(group)) for _ in range(BLOCK)]
    flat = cuda.to_device(np.ones(BLOCK * count, np.float32), on.device(group))

    def one_by_one() -> None:
        for x in xs:
            group.all_reduce(x)

    def coalesced() -> None:
        with group.coalescing_manager():
            one_by_one()

    with group.coalescing_manager() as manager:
        one_by_one()
    plan = manager.plan()
    ways: dict[str, Callable[[], object]] = {
        "one by one": one_by_one,
        "coalesced": coalesced,
        "as a plan": plan.launch,
        "flattened": lambda: group.all_reduce(flat),
    }
    return [timed(f"  nc10d, {name}", way, cuda.synchronize) for name, way in ways.items()]


def timed(name: str, way: Callable[[], object], finish: Callable[[], object]) -> Row:
    """Return the medians of the time until the call has returned, and until the device is done."""
    way()
    finish()
    host, device = [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        way()
        returned = time.perf_counter()
        finish()
        host.append(returned - begin)
        device.append(time.perf_counter() - begin)
    micro = [1e6 * statistics.median(times) for times in (host, device)]
    return Row(name, f"{micro[0]:9.1f} us of CPU, {micro[1]:9.1f} us in all")


def torch_blocks() -> list[Row]:
    """Time the same by torch.distributed, in a process of its own; torch must have CUDA."""
    try:
        import torch
    except ImportError:
        return [Row("  torch", "not installed here")]
    if not torch.cuda.is_available():
        return [Row("  torch", "without CUDA here")]
    done = subprocess.run([sys.executable, __file__, "--torch"], capture_output=True, text=True)
    if done.returncode:
        return [Row("  torch", done.stderr.strip().splitlines()[-1], failed=True)]
    lines = [line.partition(" = ") for line in done.stdout.strip().splitlines()]
    return [Row(name, result) for name, _, result in lines]


def torch_main() -> None:
    """Print what torch takes, a row a line."""
    import torch
    import torch.distributed as c10d

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    c10d.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    xs = [torch.ones(MIB * 2**20 // 4, device="cuda:0") for _ in range(BLOCK)]

    def one_by_one() -> None:
        for x in xs:
            c10d.all_reduce(x)

    def coalesced() -> None:
        with c10d._coalescing_manager(device=torch.device("cuda:0")):
            one_by_one()

    for name, way in (("one by one", one_by_one), ("coalesced", coalesced)):
        row = timed(f"  torch, {name}", way, torch.cuda.synchronize)
        print(f"{row.name} = {row.result}")
    c10d.destroy_process_group()


def bandwidth(count: int) -> list[Row]:
    """Measure all_reduce over all cards, as nccl-tests count it."""
    if count < 2:
        return [Row("  bus bandwidth", "one card only")]
    with Ranks(count, "processes", "nccl", timeout=TIMEOUT) as ranks:
        return ranks.run(bandwidths)[0]


def bandwidths(group: ProcessGroup) -> list[Row]:
    """Return a row for each size."""
    with cuda.on_device(on.device(group)):
        return rates(group)


def rates(group: ProcessGroup) -> list[Row]:
    """Return a row for each size, on this thread's current device."""
    rows = []
    for mib in (1, 16, 256):
        x = cuda.to_device(np.ones(mib * 2**18, np.float32), on.device(group))
        times = []
        for _ in range(ROUNDS):
            group.barrier()
            begin = time.perf_counter()
            work = group.all_reduce(x, async_op=True)
            assert isinstance(work, NcclWork)
            work.wait_blocking()
            times.append(time.perf_counter() - begin)
        rate = 2 * (group.size - 1) / group.size * x.nbytes / statistics.median(times) / 1e9
        rows.append(Row(f"  all_reduce of {mib} MiB, {group.size} cards", f"{rate:.1f} GB/s"))
    return rows


if __name__ == "__main__":
    if sys.argv[1:] == ["--torch"]:
        torch_main()
    elif not cuda.available():
        sys.exit(
            "gpu-check: this process can use no GPU (no driver, no device, or no cuda-bindings)"
        )
    else:
        sys.exit(min(main(), 1))
