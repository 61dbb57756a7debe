"""How ranks meet before NCCL: all are known to be there, and hold the same unique id.

NCCL waits for a missing rank for ever. So the ranks count themselves in the store; the last to come
writes that all may go, who gives up writes why nobody does; the first word holds for everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nc10d.backend.nccl.library import Library
from nc10d.deadline import Deadline
from nc10d.errors import RendezvousError, StoreTimeout

if TYPE_CHECKING:
    from nc10d.store.base import Store

_SLICE = 0.05  # seconds from look to look whether waiting still has a point
_GO = b"go"


def meet(
    store: Store,
    library: Library,
    what: str,
    rank: int,
    size: int,
    deadline: Deadline,
    check: Callable[[], None],
) -> bytes:
    """Wait until all `size` ranks have called with a store of their own; return the unique id.

    `what` is what they form, for errors; `check` is called meanwhile and raises what makes waiting
    pointless. RendezvousError, the same on all ranks, says who had not come by the first deadline.
    """
    if rank == 0:
        store.set("id", library.unique_id())
    store.set(f"here/{rank}", "")
    if store.add("come", 1) == size:
        store.compare_set("verdict", "", _GO)
    verdict = _verdict(store, what, size, deadline, check)
    if verdict != _GO:
        raise RendezvousError(verdict.decode(errors="replace"))
    return store.get("id")


def _verdict(
    store: Store, what: str, size: int, deadline: Deadline, check: Callable[[], None]
) -> bytes:
    """Wait for the word that holds for everybody, or say it."""
    while not deadline.expired():
        check()
        try:
            store.wait(["verdict"], deadline.slice(_SLICE))
        except StoreTimeout:
            continue
        return store.get("verdict")
    missing = [rank for rank in range(size) if not store.check([f"here/{rank}"])]
    reason = f"{what}: ranks {missing} of {size} have not come in time"
    return store.compare_set("verdict", "", reason)
