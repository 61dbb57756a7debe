"""Programs of groups that span hosts, run by the simulator: right on any hosts, in any order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from algorithm_cases import MAKERS, Case, layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.backend.cpu.algorithms.topology import Topology, grouped
from nc10d.testing.cluster import Cluster

HALF, SMALL = 4096, 1024


def play(hosts: Topology, cases: list[Case], half: int, seed: int | None) -> Cluster:
    """Run cases back to back and hold every array against what it must be."""
    cluster = Cluster(hosts, half, room=half // 4)
    for case in cases:
        for rank in range(hosts.size):
            users = [a.view(np.uint8) for a in case.arrays[rank]]
            cluster.submit(rank, case.programs[rank], users)
    rng = random.Random(seed)
    cluster.run(None if seed is None else rng.randrange)
    for case in cases:
        for got, want in zip(case.arrays, case.expected, strict=True):
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=case.name)
    return cluster


def world(hosts: Topology, half: int = HALF, small: int = SMALL) -> list:
    return layouts(hosts.size, half, small, hosts)


SHAPES = ["01", "0011", "0101", "0001", "012", "001122", "000112", "01234", "0110220", "0120121"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MAKERS)
def test_every_shape_of_hosts_computes_what_the_oracle_says(name: str, shape: str) -> None:
    hosts = grouped(shape)
    for seed, count in ((1, 0), (2, 1), (3, 37), (4, 700), (6, 5000)):
        play(hosts, [MAKERS[name](world(hosts), count, seed)], HALF, seed)


@pytest.mark.parametrize("shape", ["01", "0011", "0001", "00012"])
@pytest.mark.parametrize("name", MAKERS)
def test_arrays_of_many_segments(name: str, shape: str) -> None:
    hosts = grouped(shape)
    for seed in (3, 4, 8):
        play(hosts, [MAKERS[name](world(hosts, 65536), 50_000, seed)], 65536, seed)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "fused", "broadcast", "barrier"])
def test_64_hosts_of_8_ranks(name: str) -> None:
    hosts = grouped([rank // 8 for rank in range(512)])
    for count in (1, 2000):
        play(hosts, [MAKERS[name](world(hosts, 32768), count, 3)], 32768, None)


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.integers(0, 3), min_size=2, max_size=6).filter(lambda n: len(set(n)) > 1),
    kinds=st.lists(st.sampled_from(sorted(MAKERS)), min_size=2, max_size=5),
    counts=st.lists(st.sampled_from([0, 1, 3, 130, 700, 1500]), min_size=5, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_programs_mix_back_to_back_in_any_interleaving(
    names: list[int], kinds: list[str], counts: list[int], seed: int
) -> None:
    hosts = grouped(names)
    cases = [
        MAKERS[kind](world(hosts), count, seed % 100 + i)
        for i, (kind, count) in enumerate(zip(kinds, counts, strict=False))
    ]
    play(hosts, cases, HALF, seed)
