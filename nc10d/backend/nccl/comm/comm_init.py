"""Arrival of all ranks before NCCL: all have called, and have the same unique id.

NCCL waits for a missing rank for ever. So the ranks count themselves in the store. The last rank to
arrive writes the permission to go on; a rank that gives up writes the reason. The first of these
entries holds for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nc10d.backend.nccl.bindings.library import Library
from nc10d.base.deadline import Deadline
from nc10d.errors import RendezvousError
from nc10d.store.arrival import arrive

if TYPE_CHECKING:
    from nc10d.store.base import Store

_GO = "go"


def wait_for_ranks(
    store: Store,
    library: Library,
    name: str,
    rank: int,
    size: int,
    deadline: Deadline,
    check: Callable[[], None],
) -> bytes:
    """Wait until all `size` ranks have called with a store of their own; return the unique id.

    `name` is the communicator's in errors. `check` is called meanwhile and raises if waiting has
    become pointless. RendezvousError, the same on all ranks, names the ranks that had not arrived
    by the first deadline.
    """
    if rank == 0:
        store.set("id", library.unique_id())
    store.set(f"here/{rank}", "")

    def give_up() -> str:
        missing = [other for other in range(size) if not store.check([f"here/{other}"])]
        return f"{name}: ranks {missing} of {size} have not come in time"

    verdict = arrive(store, size, lambda: _GO, give_up, deadline, check)
    if verdict != _GO.encode():
        raise RendezvousError(verdict.decode(errors="replace"))
    return store.get("id")
