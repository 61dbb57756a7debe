"""Ordered reductions across hosts: the bits of a fold in rank order, however ranks lie on hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lettered_hosts import ranks_on
from own_reduction_cases import fields, in_every_form, rows

import nc10d as dist
from nc10d import ops as O
from nc10d.arrays.dtypes import DType
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import reference
from nc10d.testing.strategies import mixed_values

HOSTS = ["AAB", "ABAB", "ABBCA"]
OPS = (O.SUM, O.AVG, O.PRODUCT, O.premul_sum(0.3))


def folds(group: ProcessGroup, count: int) -> None:
    dtype = (DType.FLOAT32, DType.BFLOAT16, DType.COMPLEX64)[count % 3]
    every = [mixed_values(dtype, count, rank) for rank in range(group.size)]
    for op in OPS:
        expected = reference.all_reduce(every, op)[0]
        for _ in range(2):  # the second call is prepared
            x = every[group.rank].copy()
            group.all_reduce(x, op.ordered)
            assert reference.same_bits(x, expected), op
        x, y = every[group.rank].copy(), every[group.rank].copy()
        with dist.coalescing_manager(group):
            group.all_reduce(x, op.ordered)
            group.all_reduce(y, op.ordered)
        assert reference.same_bits(x, expected), op
        assert reference.same_bits(y, expected), op
        lists = [every[r:] + every[:r] for r in range(group.size)]
        out = np.zeros_like(x)
        group.reduce_scatter(out, lists[group.rank], op.ordered)
        assert reference.same_bits(out, reference.reduce_scatter(lists, op)[group.rank]), op


@pytest.mark.parametrize("hosts", HOSTS)
def test_ordered_folds_do_not_depend_on_hosts(hosts: str) -> None:
    with ranks_on(hosts) as ranks:
        for count in (0, 1, 5, 4000, 40_001):
            ranks.run(folds, [count] * len(hosts))


@pytest.mark.parametrize(
    ("hosts", "name"), [("AB", "best"), ("ABA", "packed"), ("ABCA", "product"), ("ABC", "argmax")]
)
def test_ones_own_reductions_fold_in_rank_order_on_any_hosts(hosts: str, name: str) -> None:
    with ranks_on(hosts) as ranks:
        for count in (0, 700):
            ranks.run(in_every_form, [name] * len(hosts), [count] * len(hosts))


def test_fields_and_rows_cross_hosts() -> None:
    with ranks_on("ABA") as ranks:
        ranks.run(fields)
        ranks.run(rows)


def test_ordered_is_another_reduction_only_where_it_matters() -> None:
    assert O.SUM.ordered is O.SUM.ordered
    assert O.SUM.ordered is not O.SUM
    assert O.SUM.ordered.ordered is O.SUM.ordered
    assert O.SUM.ordered.name == "SUM.ordered"
    assert O.AVG.ordered.unfinished is O.SUM.ordered
    assert O.premul_sum(2).ordered.compared == "PREMUL_SUM.ordered(2.0)"


def unlike(group: ProcessGroup, arrays: Any = None) -> None:
    x = np.ones(3)
    with pytest.raises(dist.CollectiveMismatch, match=r"op=SUM\.ordered"):
        group.all_reduce(x, O.SUM if group.rank else O.SUM.ordered)


def test_a_rank_that_does_not_ask_for_the_order_is_a_mismatch() -> None:
    with ranks_on("AB") as ranks:
        ranks.run(unlike)
