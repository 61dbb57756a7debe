"""Which cores ranks of a host have together, and what they choose by that."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.backend.cpu import context
from nc10d.backend.cpu.algorithms.tuning import Boards, one_shot_bytes
from nc10d.backend.cpu.bootstrap.rank_info import RankInfo
from nc10d.backend.cpu.engine import cpu_policy as cpu_cores
from nc10d.backend.cpu.engine.cpu_policy import (
    boards,
    cores,
    own_boards,
    quota,
    roomy,
    waiting_policy,
)
from nc10d.errors import RendezvousError
from nc10d.testing.ranks import Ranks

CARD = RankInfo(0, "host", "here", 1, "", "", "", "", [0, 1, 2, 3], math.inf, Boards.NORMAL)


def cards(*allowed: list[int], most: float = math.inf) -> list[RankInfo]:
    return [dataclasses.replace(CARD, cores=some, quota=most) for some in allowed]


def room_for(peers: list[RankInfo]) -> bool:
    return roomy([info.cores for info in peers], [info.quota for info in peers])


@pytest.mark.parametrize(
    ("mates", "has_room"),
    [
        (cards([0]), True),
        (cards([0], [1]), True),  # bound to a core each, as launchers do
        (cards([0], [0]), False),
        (cards([0, 1], [0, 1]), True),
        (cards([0, 1], [0, 1], [0, 1]), False),
        (cards([0, 1], [1, 2], [0, 2]), True),
        (cards([0, 1], [0, 1], most=2.0), True),
        (cards([0, 1], [0, 1], most=1.5), False),
    ],
)
def test_ranks_have_room_if_there_is_a_core_for_each(mates: list[RankInfo], has_room: bool) -> None:
    assert room_for(mates) == has_room


def test_the_smallest_quota_counts() -> None:
    assert not room_for([*cards([0, 1]), *cards([0, 1], most=1.0)])


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


def test_who_shares_a_core_does_not_spin() -> None:
    assert waiting_policy(True).spin > waiting_policy(False).spin == 0


def _sums(group: dist.ProcessGroup) -> tuple[int, list[float]]:
    backend: Any = group.backend("cpu")
    limit = backend.shape.small
    arrays = [np.full(count, group.rank + 1.0, np.float32) for count in (1, limit // 4, limit)]
    for x in arrays:
        group.all_reduce(x)
    return limit, [value for x in arrays for value in set(x.tolist())]


@pytest.mark.parametrize("has_room", [False, True])
def test_all_ranks_choose_alike_and_sum_alike(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "roomy", lambda _cores, _quotas: has_room)
    with Ranks(4, "threads") as ranks:
        limit = one_shot_bytes(4, roomy=has_room)
        assert ranks.run(_sums) == [(limit, [10.0, 10.0, 10.0])] * 4


@pytest.mark.parametrize(
    ("asked", "cpu", "found"),
    [
        ("", "znver3", Boards.QUICKEST),
        ("", "znver5", Boards.QUICK),
        ("", "sapphirerapids", Boards.NORMAL),
        ("0", "znver3", Boards.NORMAL),
        ("2", "sapphirerapids", Boards.QUICKEST),
    ],
)
def test_boards_are_quick_by_the_cpu_unless_told_otherwise(
    asked: str, cpu: str, found: Boards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NC10D_QUICK_BOARDS", asked)
    monkeypatch.setattr(cpu_cores, "cpu_name", lambda: cpu)
    assert own_boards() is found


@pytest.mark.parametrize("asked", ["3", "-1", "yes"])
def test_a_wrong_word_on_boards_is_an_error(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_QUICK_BOARDS", asked)
    with pytest.raises(RendezvousError, match=f"NC10D_QUICK_BOARDS='{asked}'.*0, 1, 2"):
        own_boards()


def test_one_rank_that_was_told_otherwise_decides_for_its_host() -> None:
    quickest = dataclasses.replace(CARD, boards=Boards.QUICKEST)
    quick = dataclasses.replace(CARD, boards=Boards.QUICK)
    assert boards([quickest.boards, quickest.boards]) is Boards.QUICKEST
    assert boards([quickest.boards, quick.boards]) is Boards.QUICK
    assert boards([quickest.boards, CARD.boards]) is Boards.NORMAL
