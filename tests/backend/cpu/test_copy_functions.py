"""Results do not depend on the copy: through staging buffers or by the kernel, by any function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS, NEVER, Thresholds
from nc10d.backend.cpu.engine.cpu_policy import THRESHOLDS
from nc10d.group.process_group import ProcessGroup
from nc10d.kernels import copy
from nc10d.testing import Ranks, reference, run_ranks


def exchange(group: ProcessGroup, nbytes: int) -> None:
    """Carry out each collective that copies, and a message, with arrays of so many bytes."""
    me, size = group.rank, group.size
    count = nbytes // 4 // size
    whole = [np.random.default_rng(r).random((size, count), np.float32) for r in range(size)]
    x = whole[me].copy()
    group.all_reduce(x)
    assert reference.same_bits(x, reference.all_reduce(whole)[me])
    chunk = np.empty(count, np.float32)
    group.reduce_scatter_tensor(chunk, whole[me])
    assert reference.same_bits(chunk, reference.reduce_scatter(whole)[me])
    out = np.empty_like(x)
    group.all_gather_into_tensor(out, whole[me][0])
    assert np.array_equal(out, np.stack([theirs[0] for theirs in whole]))
    group.all_to_all_single(out, whole[me])
    assert np.array_equal(out, np.stack([theirs[me] for theirs in whole]))
    x = whole[me].copy()
    group.broadcast(x, size - 1)
    assert np.array_equal(x, whole[-1])
    work = group.isend(whole[me], (me + 1) % size)
    group.recv(out, (me - 1) % size)
    work.wait()
    assert np.array_equal(out, whole[me - 1])


def around_thresholds(group: ProcessGroup) -> Thresholds:
    """Exchange arrays just below and just above the sizes from which the kernel copies."""
    backend: Any = group.backend("cpu")
    found: Thresholds = backend.shape.thresholds
    for limit in (64 << 10, 1 << 20, 4 << 20, 32 << 20):
        for nbytes in (limit - 4 * group.size, limit + 4 * group.size):
            exchange(group, nbytes)
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("limits", [DEFAULTS, Thresholds(32 << 20, NEVER)])
def test_staging_buffers_and_the_kernel_give_the_same_results(
    size: int, limits: Thresholds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THRESHOLDS, f"{limits.read_from},{limits.write_from}")
    with Ranks(size, "processes", timeout=150) as ranks:
        assert ranks.run(around_thresholds) == [limits] * size


def small_and_large(group: ProcessGroup) -> None:
    for nbytes in (24 * group.size, 3_000 * group.size, 200_000, 1_500_000):
        exchange(group, nbytes)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("slow", "least"), [(True, 1 << 62), (False, 1), (True, 100_000)])
def test_every_copy_function_gives_the_same_results(
    size: int, slow: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "needed", lambda: slow)
    monkeypatch.setattr(copy, "STREAM_BYTES", least)
    run_ranks(small_and_large, size, "threads")
