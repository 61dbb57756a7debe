"""Calls that end with an error on every rank: ranks that call nothing, and calls that disagree."""

from __future__ import annotations

from typing import Any

import numpy as np

import nc10d as dist
from nc10d.errors import DistError


def caught(group: Any, call: Any) -> DistError:
    """Return the error that `call` ends with on this rank."""
    try:
        call(group)
    except DistError as error:
        return error
    raise AssertionError(f"rank {group.rank} noticed nothing")


def stand_aside(group: Any) -> DistError:
    """Call nothing until the group has failed, then make a call to hear why."""
    backend = group.backend("cpu")
    while backend.failure() is None:
        pass
    return caught(group, lambda g: g.barrier())


CALLS: dict[str, Any] = {
    "all_reduce": lambda g: g.all_reduce(np.ones(4)),
    "barrier": lambda g: g.barrier(),
    "broadcast": lambda g: g.broadcast(np.ones(4), 0),
    "root": lambda g: g.broadcast(np.ones(4), 1),
    "dtype": lambda g: g.all_reduce(np.ones(4, np.float32)),
    "count": lambda g: g.all_reduce(np.ones(5)),
    "op": lambda g: g.all_reduce(np.ones(4), dist.ReduceOp.MAX),
    "large": lambda g: g.all_reduce(np.ones(1 << 18)),
    "gather": lambda g: g.all_gather_into_tensor(np.ones(4 * g.size), np.ones(4)),
    "reduce": lambda g: g.reduce(np.ones(4), 0),
}
