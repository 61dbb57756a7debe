"""The rows of tools/gpu_check.py that pass or fail: conformance, and laws of streams."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import audited_ranks as audited
import device_ranks as on
import lone_ranks
import mirrored
import test_nccl_conformance as conformance
import test_nccl_mismatch as mismatch
import test_nccl_only_reducer as only
import through_device
from captured_training import a_captured_training_step_reads_nothing
from gpu_rows import NOT_HERE, Row, first_line
from nccl_features import FEATURES, a_group_grows
from test_device_functional import every_call_is_the_reference
from test_nccl_alone import LONE
from test_nccl_any_source import messages_come_from_whoever_sends
from test_nccl_device import LAWS

import nc10d as dist
from nc10d.arrays.dtypes import DType
from nc10d.backend.nccl.comm.options import NONBLOCKING
from nc10d.backend.registry import find_backend, register_backend
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import check_backend
from nc10d.testing.ranks import Ranks

TIMEOUT = 60.0
BACKENDS = "cpu:cpu,cuda:nccl"
FLOATS = (DType.FLOAT32,)
LACKS = "UnsupportedPlatform"
"""The error of a law whose feature this machine or its NCCL lacks; other errors are failures."""
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


def keep_laws(size: int, nonblocking: bool = False) -> Iterator[Row]:
    """Run each law in a group of its own; a single rank has other laws than several."""
    return kept_laws(named(LONE if size == 1 else LAWS), size, nonblocking)


def keep_features(size: int) -> Iterator[Row]:
    """Run the laws of what NCCL has beyond collectives, and of device arrays elsewhere."""
    laws: list[Law] = [*FEATURES, a_captured_training_step_reads_nothing]
    if size > 1:
        laws += [functional_calls_are_the_reference, a_group_grows]
        laws += [only.used_parameters_are_those_of_all_ranks, only.rows_on_a_device_are_averaged]
        laws.append(mismatch.the_first_calls_are_compared)
        laws.append(mismatch.calls_of_ranks_that_run_ahead_are_compared)
    yield from kept_laws(named(laws), size)
    if size > 1:
        yield from kept_laws(named([messages_come_from_whoever_sends]), 3)


def keep_queues() -> Iterator[Row]:
    """Let both ranks receive first, with few hardware queues and with many."""
    for queues in map(str, audited.CONNECTIONS):
        given = {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
        laws = {f"{name}, {queues} queues": law for name, law in audited.messages().items()}
        for name, law in laws.items():  # in new ranks, whose streams share queues in the same way
            yield from kept_laws({name: law}, 2, given=given)


def keep_audited(kind: str) -> Iterator[Row]:
    """Run the laws of one kind, with both kinds of communicators."""
    laws = named(getattr(audited, kind))
    for nonblocking in (False, True):
        yield from kept_laws(laws, 2, nonblocking)


def functional_calls_are_the_reference(group: ProcessGroup) -> None:
    """The functional collectives, on nc10d's own device arrays."""
    every_call_is_the_reference(group, "nc10d")


def named(laws: Sequence[Law]) -> dict[str, Law]:
    """Return laws by name."""
    return {law.__name__: law for law in laws}


def kept_laws(
    laws: Mapping[str, Law],
    size: int,
    nonblocking: bool = False,
    given: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """Yield a row for each law; ranks that a law has broken are replaced for the next.

    `given` are environment variables of the ranks.
    """
    kind = " nonblocking" if nonblocking else ""
    variables = {NONBLOCKING[0]: "1" if nonblocking else "0", **(given or {})}
    left = list(laws.items())
    while left:
        with environment(variables), Ranks(size, "processes", BACKENDS, TIMEOUT) as ranks:
            ranks.run(on.be_a_host_of_ones_own)
            failed = False
            while left and not failed:
                name, law = left.pop(0)
                row = row_of(ranks, f"{name},{kind} {size}", law, size)
                yield row
                failed = row.failed


def row_of(ranks: Ranks, name: str, law: Law, size: int) -> Row:
    """Run a law on all ranks; return its row."""
    try:
        ranks.run(in_its_own_group, [law] * size)
    except Exception as error:  # noqa: BLE001  (the other laws still run)
        text = first_line(error)
        if LACKS in f"{type(error).__name__}: {error}":  # this machine's cards, or its NCCL
            return Row(name, NOT_HERE + text)
        return Row(name, text, failed=True)
    return Row(name, "ok")


@contextlib.contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
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


def libraries() -> Iterator[Row]:
    """Run the laws of each installed array library; a library that is missing is no failure."""
    laws = {f"arrays of {name}": (name, law) for name, law in lone_ranks.LIBRARIES.items()}
    laws |= {f"pool of {name}": (name, law) for name, law in lone_ranks.POOLS.items()}
    torchs = audited.memory_of_torchs_temporaries_is_bounded
    laws["memory of torch's temporaries"] = ("torch", torchs)
    for row, (name, law) in laws.items():
        if importlib.util.find_spec(name) is None:
            yield Row(row, f"{NOT_HERE}{name} is not installed")
            continue
        with Ranks(1, "processes", "nccl", TIMEOUT) as ranks:
            yield row_of(ranks, row, law, 1)
