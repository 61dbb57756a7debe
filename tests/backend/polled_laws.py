"""Laws of calls that differ, for backends over a library that is polled (MPI, UCC).

A rank runs each function with its group, of SIZE ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from call_pairs import EQUAL, PAIRS

import nc10d as dist
from nc10d.errors import CollectiveMismatch
from nc10d.group.process_group import ProcessGroup

SIZE = 3


def whole_group(group: ProcessGroup, timeout: float = 20.0, options: Any = None) -> ProcessGroup:
    """Make a new group, which the test may break."""
    made = dist.new_group(range(group.size), timeout, pg_options=options)
    assert isinstance(made, ProcessGroup)
    return made


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def calls_differ(group: ProcessGroup) -> str:
    sub, x = whole_group(group), np.full(5, 7.0)
    text = raised(
        CollectiveMismatch, lambda: sub.all_reduce(x) if group.rank else sub.broadcast(x, 1)
    )
    assert (x == 7.0).all()
    assert raised(CollectiveMismatch, sub.barrier) == text
    return text


def sizes_differ(group: ProcessGroup) -> str:
    sub, rank = whole_group(group), group.rank
    outs = [np.zeros(2 + (rank == 2 and r == 0)) for r in range(SIZE)]
    ins = [np.ones(2) for _ in range(SIZE)]
    text = raised(CollectiveMismatch, lambda: sub.all_to_all(outs, ins))
    assert all((x == 0).all() for x in outs)
    return text


def every_fact_is_compared(group: ProcessGroup) -> None:
    """Launch each pair of calls in a group of its own, of ranks 0 and 1."""
    for name, pair in (*PAIRS.items(), *EQUAL.items()):
        sub = dist.new_group([0, 1])
        if isinstance(sub, ProcessGroup):
            launch = functools.partial(
                sub.backend("cpu").launch, [pair[sub.rank](sub.rank)], 20.0, False
            )
            if name in EQUAL:
                launch()
            else:
                raised(CollectiveMismatch, launch)
