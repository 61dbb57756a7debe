"""Mismatching calls: the same error on every rank, at once, with both calls and lines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d import ReduceOp
from nc10d.base.call_site import text_at
from nc10d.errors import CollectiveMismatch, DistError
from nc10d.testing.ranks import Ranks

Call = Callable[[Any], object]
PATIENCE = 20.0  # of a busy machine; the table of faults measures how soon errors come
LARGE = 1 << 18
LINE = re.escape(text_at(__file__, 0).removesuffix(":0")) + r":\d+"  # of this module


def filled(count: int, dtype: Any = np.float64) -> Any:
    return np.full(count, 7, dtype)


def lists(group: Any, sent: int) -> tuple[list[Any], list[Any]]:
    """Return arrays for an all_to_all that sends so many elements to each other rank."""
    ranks = range(group.size)
    return [filled(2) for _ in ranks], [filled(2 if r == group.rank else sent) for r in ranks]


def block(group: Any, counts: list[int]) -> None:
    with dist.coalescing_manager(group):
        for count in counts:
            group.all_reduce(filled(count))


def message(group: Any, sent: Any, received: Any, peer: int = 1) -> None:
    if group.rank == 0:
        group.send(sent, peer, tag=5)
    elif group.rank == peer:
        group.recv(received, 0, tag=5)
    group.barrier()


KINDS: dict[str, tuple[Call, Call]] = {
    "operation": (lambda g: g.all_reduce(filled(4)), lambda g: g.broadcast(filled(4), 0)),
    "dtype": (lambda g: g.all_reduce(filled(4)), lambda g: g.all_reduce(filled(4, np.float32))),
    "count": (lambda g: g.all_reduce(filled(4)), lambda g: g.all_reduce(filled(5))),
    "far more": (lambda g: g.all_reduce(filled(4)), lambda g: g.all_reduce(filled(LARGE))),
    "op": (lambda g: g.all_reduce(filled(4)), lambda g: g.all_reduce(filled(4), ReduceOp.MAX)),
    "root of a broadcast": (
        lambda g: g.broadcast(filled(4), 0),
        lambda g: g.broadcast(filled(4), 1),
    ),
    "root of a reduce": (lambda g: g.reduce(filled(4), 0), lambda g: g.reduce(filled(4), 1)),
    "barrier and data": (
        lambda g: g.barrier(),
        lambda g: g.all_gather_into_tensor(filled(2 * g.size), filled(2)),
    ),
    "shape": (
        lambda g: g.all_gather_into_tensor(filled(2 * g.size), filled(2)),
        lambda g: g.all_gather_into_tensor(filled(3 * g.size), filled(3)),
    ),
    "shares": (
        lambda g: g.reduce_scatter_tensor(filled(2), filled(2 * g.size)),
        lambda g: g.reduce_scatter_tensor(filled(3), filled(3 * g.size)),
    ),
    "order of two calls": (
        lambda g: (g.all_reduce(filled(4)), g.all_reduce(filled(9))),
        lambda g: (g.all_reduce(filled(9)), g.all_reduce(filled(4))),
    ),
    "asynchronous": (
        lambda g: g.all_reduce(filled(4), async_op=True).wait(),
        lambda g: g.all_reduce(filled(6), async_op=True).wait(),
    ),
    "block": (lambda g: block(g, [3, 4]), lambda g: block(g, [3, 5])),
    "block and single calls": (lambda g: block(g, [3, 4]), lambda g: g.all_reduce(filled(3))),
    "uneven sizes": (
        lambda g: (g.all_to_all(*lists(g, 2)), g.barrier()),
        lambda g: (g.all_to_all(*lists(g, 3)), g.barrier()),
    ),
    "size of a message": (
        lambda g: message(g, filled(4), filled(4)),
        lambda g: message(g, filled(5), filled(5)),
    ),
    "dtype of a message": (
        lambda g: message(g, filled(4), filled(4)),
        lambda g: message(g, filled(4, np.int64), filled(4, np.int64)),
    ),
    "size of a large message": (
        lambda g: message(g, filled(LARGE), filled(LARGE)),
        lambda g: message(g, filled(2 * LARGE), filled(2 * LARGE)),
    ),
}


def mismatch_of(group: Any, name: str, odd: int) -> tuple[DistError, float]:
    group.barrier()
    mine, theirs = KINDS[name]
    start = time.monotonic()
    try:
        (theirs if group.rank == odd else mine)(group)
    except DistError as error:
        return error, time.monotonic() - start
    raise AssertionError(f"rank {group.rank} noticed nothing")


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_calls_that_differ_are_reported_at_once_with_both_lines(name: str, odd: int) -> None:
    with Ranks(2, timeout=2 * PATIENCE) as ranks:
        ranks.run(lambda group: group.barrier())
        errors = ranks.run(mismatch_of, [name] * 2, [odd] * 2)
    assert len({str(error) for error, _ in errors}) == 1, "one root cause everywhere"
    for error, late in errors:
        assert isinstance(error, CollectiveMismatch), error
        assert late < PATIENCE
        assert len(re.findall(LINE, str(error))) == 2, error
        assert error.seq is not None
