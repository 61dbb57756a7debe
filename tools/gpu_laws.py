"""The rows of tools/gpu_check.py that pass or fail: conformance, and laws of streams."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence

import device_ranks as on
import lone_ranks
import mirrored
import test_nccl_conformance as conformance
import through_device
from gpu_rows import Row, first_line
from test_nccl_alone import LONE
from test_nccl_device import LAWS

import nc10d as dist
from nc10d.arrays.dtypes import DType
from nc10d.backend.nccl.comm.options import NONBLOCKING
from nc10d.backend.registry import find_backend, register_backend
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import check_backend
from nc10d.testing.ranks import Ranks

TIMEOUT = 60.0
Law = Callable[[ProcessGroup], None]


def conforms(size: int, dtypes: Sequence[DType]) -> list[Row]:
    """Run the conformance suite on NCCL; several ranks may share a card."""
    register_once()
    count, wrong = conformance.complaints(size, tuple(dtypes))
    rows = [Row(f"conformance, {size} ranks", f"{count} checks", failed=bool(wrong))]
    return rows + [Row("  " + text, "wrong", failed=True) for text in wrong[:10]]


def register_once() -> None:
    """Register the backend for arrays in host memory, once per process."""
    try:
        find_backend("through-device")
    except ValueError:
        register_backend("through-device", through_device.make)


def stages(size: int, dtypes: Sequence[DType]) -> list[Row]:
    """Run the conformance suite on the staged backend, with all ranks on the same card."""
    count = check_backend(mirrored.make, (size,), "processes", dtypes=dtypes, timeout=TIMEOUT)
    return [Row(f"staged, {size} ranks on one card", f"{count} checks")]


def keep_laws(size: int, nonblocking: bool = False) -> list[Row]:
    """Run each law in a group of its own; a single rank has other laws than several."""
    kind = " nonblocking" if nonblocking else ""
    rows = []
    given = {NONBLOCKING[0]: "1" if nonblocking else "0"}
    with environment(given), Ranks(size, "processes", "cpu:cpu,cuda:nccl", TIMEOUT) as ranks:
        ranks.run(on.be_a_host_of_ones_own)
        for law in LONE if size == 1 else LAWS:
            name = f"{law.__name__},{kind} {size}"
            try:
                ranks.run(in_its_own_group, [law] * size)
                rows.append(Row(name, "ok"))
            except Exception as error:  # noqa: BLE001  (the other laws still run)
                rows.append(Row(name, first_line(error), failed=True))
    return rows


@contextlib.contextmanager
def environment(given: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start inside of the block."""
    before = {name: os.environ.pop(name, None) for name in given}
    os.environ.update(given)
    yield
    for name in given:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if value is not None})


def in_its_own_group(group: ProcessGroup, law: Law) -> None:
    """Run a law in a new group, whose store has no keys yet."""
    own = dist.new_group(range(group.size))
    assert isinstance(own, ProcessGroup)
    law(own)
    dist.destroy_process_group(own)


def libraries() -> list[Row]:
    """Run the law of each installed array library; a library that is missing is no failure."""
    rows = []
    with Ranks(1, "processes", "nccl", TIMEOUT) as ranks:
        for name, law in lone_ranks.LIBRARIES.items():
            if importlib.util.find_spec(name) is None:
                rows.append(Row(f"arrays of {name}", "not installed here"))
                continue
            try:
                ranks.run(law)
                rows.append(Row(f"arrays of {name}", "ok"))
            except Exception as error:  # noqa: BLE001  (the other laws still run)
                rows.append(Row(f"arrays of {name}", first_line(error), failed=True))
    return rows
