"""scan and exscan across hosts: the bits of the reference, however ranks lie on hosts."""

from __future__ import annotations

import pytest
from lettered_hosts import ranks_on

from nc10d import ops as O
from nc10d.arrays.dtypes import DType
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import reference
from nc10d.testing.strategies import mixed_values


def scans(group: ProcessGroup, count: int) -> None:
    rows = [mixed_values(DType.FLOAT32, count, rank) for rank in range(group.size)]
    for op in (O.SUM, O.AVG, O.premul_sum(0.5), O.MAX):
        for _ in range(2):  # the second call is prepared
            x = rows[group.rank].copy()
            group.scan(x, op)
            assert reference.same_bits(x, reference.scan(rows, op)[group.rank]), op
            x = rows[group.rank].copy()
            group.exscan(x, op, identity=True)
            expected = reference.exscan(rows, op, identity=True)
            assert reference.same_bits(x, expected[group.rank]), op


@pytest.mark.parametrize("hosts", ["AB", "AAB", "ABB", "ABAB", "ABC", "ABBCAA"])
def test_ranks_may_lie_on_hosts_in_any_order(hosts: str) -> None:
    with ranks_on(hosts) as ranks:
        for count in (0, 1, 3, 1000, 150_001):
            ranks.run(scans, [count] * len(hosts))
