"""A worker of a pool: comes to worlds as it is told on stdin, and answers each on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from nc10d.errors import DistError

leave: Callable[[], object] = lambda: None  # noqa: E731  (replaced in every world)


def meet(method: str, rank: int, size: int, timeout: float) -> list[str]:
    """Meet the others; return a value from each of them. The worker stays until it is told."""
    global leave
    from nc10d.init_methods.methods import rendezvous

    store, rank, size = rendezvous(method, rank, size, timeout)
    leave = store.close
    store.set(f"value/{rank}", f"rank {rank} of {size}")
    return [value.decode() for value in store.multi_get([f"value/{r}" for r in range(size)])]


def init(method: str, rank: int, size: int, timeout: float) -> list[str]:
    """Make a default group with the others; return a sum of all ranks."""
    global leave
    import numpy as np

    import nc10d as dist

    dist.init_process_group("cpu", method, timeout, size, rank)
    leave = dist.destroy_process_group
    x = np.ones(1)
    dist.all_reduce(x)
    return [str(x[0])]


def answer(call: str, *arguments: Any) -> tuple[str, Any]:
    """Leave the world before, and come to the next; return "met" or the type of an error."""
    global leave
    before, leave = leave, lambda: None
    before()
    try:
        return "met", {"meet": meet, "init": init, "leave": list}[call](*arguments)
    except DistError as error:
        return type(error).__name__, str(error)


for line in sys.stdin:
    print(json.dumps(answer(*json.loads(line))), flush=True)
