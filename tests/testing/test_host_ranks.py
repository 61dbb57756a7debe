"""Ranks on hosts that only the network connects: `run_ranks(..., hosts=2)`."""

import os
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.errors import UnsupportedPlatform
from nc10d.testing import HostRanks, run_ranks
from nc10d.testing.hosts import namespaces

REASON = namespaces.why_not()


def reduced_there(group: Any, x: Any) -> tuple[float, str]:
    dist.all_reduce(x)
    return float(x[0]), os.readlink("/proc/self/ns/net")


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_ranks_are_on_hosts_in_blocks_and_form_new_groups_after_an_error() -> None:
    with HostRanks(3, 2, timeout=60.0) as ranks:
        for _ in range(2):
            sums, hosts = zip(*ranks.run(reduced_there, [np.ones(1)] * 3), strict=True)
            assert sums == (3.0,) * 3
            assert hosts[0] == hosts[1] != hosts[2]
            assert os.readlink("/proc/self/ns/net") not in hosts
            with pytest.raises(LookupError):
                ranks.run(lambda group: {}[group.rank])


@pytest.mark.ranks(2, kind="processes", hosts=2, timeout=60)
def test_the_mark_has_hosts(world: Any) -> None:
    x = np.ones(1)
    dist.all_reduce(x)
    assert x[0] == 2


def test_wrong_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="2 hosts are for kind='processes', not 'threads'"):
        run_ranks(reduced_there, 2, hosts=2)
    with pytest.raises(ValueError, match="expected 1 to 2 hosts for as many ranks, got 3"):
        run_ranks(reduced_there, 2, "processes", [np.ones(1)] * 2, hosts=3)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnsupportedPlatform, match="need ip"):
        run_ranks(reduced_there, 2, "processes", [np.ones(1)] * 2, hosts=2)
