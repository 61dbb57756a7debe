"""CPU policy: the cores that ranks of a host share, and the choices that follow from them."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.backend.cpu.algorithms.group_shape import NEVER, Thresholds, one_shot_bytes
from nc10d.backend.cpu.bootstrap.rank_info import RankInfo
from nc10d.backend.cpu.engine import cpu_policy
from nc10d.backend.cpu.engine.cpu_policy import (
    FAST_STAGING,
    THRESHOLDS,
    agreed_thresholds,
    cores,
    oversubscribed,
    own_thresholds,
    quota,
    waiting_policy,
)
from nc10d.errors import RendezvousError
from nc10d.testing.ranks import Ranks

CARD = RankInfo(0, "host", "here", 1, "", "", "", "", [0, 1, 2, 3], math.inf, 0, 0)


def cards(*allowed: list[int], most: float = math.inf) -> list[RankInfo]:
    return [dataclasses.replace(CARD, cores=some, quota=most) for some in allowed]


@pytest.mark.parametrize(
    ("peers", "is_oversubscribed"),
    [
        (cards([0]), False),
        (cards([0], [1]), False),  # bound to a core each, as launchers do
        (cards([0], [0]), True),
        (cards([0, 1], [0, 1]), False),
        (cards([0, 1], [0, 1], [0, 1]), True),
        (cards([0, 1], [1, 2], [0, 2]), False),
        (cards([0, 1], [0, 1], most=2.0), False),
        (cards([0, 1], [0, 1], most=1.5), True),
    ],
)
def test_a_host_is_oversubscribed_if_it_has_fewer_cores_than_ranks(
    peers: list[RankInfo], is_oversubscribed: bool
) -> None:
    assert (
        oversubscribed([info.cores for info in peers], [info.quota for info in peers])
        == is_oversubscribed
    )


def test_the_smallest_quota_counts() -> None:
    assert oversubscribed([[0, 1], [0, 1]], [math.inf, 1.0])


@pytest.mark.parametrize(
    ("text", "found"),
    [("max 100000\n", math.inf), ("250000 100000", 2.5), ("1000 100000", 1.0), ("", math.inf)],
)
def test_a_quota_is_read_in_cores(text: str, found: float, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert quota(tmp_path / "cpu.max") == found


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path / "cpu.max") == math.inf
    assert 1.0 <= cores() <= len(os.sched_getaffinity(0))


def test_ranks_that_share_a_core_do_not_spin() -> None:
    alone, sharing = (
        waiting_policy(oversubscribed=is_oversubscribed) for is_oversubscribed in (False, True)
    )
    assert alone.spin > sharing.spin == 0


def _sums(group: dist.ProcessGroup) -> tuple[int, list[float]]:
    backend: Any = group.backend("cpu")
    limit = backend.shape.one_shot
    arrays = [np.full(count, group.rank + 1.0, np.float32) for count in (1, limit // 4, limit)]
    for x in arrays:
        group.all_reduce(x)
    return limit, [value for x in arrays for value in set(x.tolist())]


@pytest.mark.parametrize("is_oversubscribed", [False, True])
def test_all_ranks_choose_the_same_algorithm_and_get_the_same_sum(
    is_oversubscribed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_policy, "oversubscribed", lambda _cores, _quotas: is_oversubscribed)
    with Ranks(4, "threads") as ranks:
        limit = one_shot_bytes(4, oversubscribed=is_oversubscribed)
        assert ranks.run(_sums) == [(limit, [10.0, 10.0, 10.0])] * 4


@pytest.mark.parametrize(
    ("text", "cpu", "found"),
    [
        ("", "znver3", FAST_STAGING),
        ("", "znver5", FAST_STAGING),
        ("", "sapphirerapids", Thresholds()),
        ("4096,8192", "znver3", Thresholds(4096, 8192)),
        ("4096", "sapphirerapids", Thresholds(4096, NEVER)),
    ],
)
def test_thresholds_are_those_of_the_cpu_unless_the_variable_gives_others(
    text: str, cpu: str, found: Thresholds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THRESHOLDS, text)
    monkeypatch.setattr(cpu_policy, "cpu_name", lambda: cpu)
    assert own_thresholds() == found


@pytest.mark.parametrize("text", ["-1", "yes", "1,2,3", "1,"])
def test_a_wrong_threshold_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THRESHOLDS, text)
    with pytest.raises(RendezvousError, match=f"{THRESHOLDS}='{text}' is not READ or READ,WRITE"):
        own_thresholds()


def test_the_smallest_thresholds_of_a_host_hold_for_all_its_ranks() -> None:
    published = [Thresholds(8192, 4096), Thresholds(4096, NEVER), Thresholds(NEVER, NEVER)]
    assert agreed_thresholds(published) == Thresholds(4096, 4096)
    assert agreed_thresholds(published[1:]) == Thresholds(4096, NEVER)
