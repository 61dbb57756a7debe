"""How ranks meet in the store before a call of NCCL's in which NCCL waits for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nc10d.backend.abilities import OtherBackends
from nc10d.backend.nccl.bindings.library import Library
from nc10d.backend.nccl.comm.communicator import Communicator
from nc10d.base.deadline import Deadline
from nc10d.base.text import ranks_text
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError
from nc10d.store.arrival import arrive
from nc10d.store.base import Store

OLD = "old"
"""The store's key for "a communicator grows", and above the keys of ranks that one has."""
_GO = "go"
_ALONE = OtherBackends()


class Parent(NamedTuple):
    """The communicator that a group grows from, and this rank's place there."""

    communicator: Communicator
    rank: int
    size: int


def meet(
    store: Store,
    name: str,
    rank: int,
    size: int,
    deadline: Deadline,
    check: Callable[[], None],
    others: OtherBackends = _ALONE,
    conclude: Callable[[], str] = lambda: _GO,
    members: Sequence[int] | None = None,
) -> None:
    """Wait until all `size` ranks have called with a store of their own.

    NCCL waits for a missing rank for ever. So the ranks count themselves in the store. The last
    rank to arrive writes the permission to go on, `conclude()`, which may be a reason not to; a
    rank that gives up writes the reason. The first of these entries holds for all ranks.

    `name` is what the ranks come to, in errors, which number ranks as `members` do. `check` is
    called meanwhile and raises if waiting has become pointless. PeerLost if a rank that has not
    come is gone, as `others` know. RendezvousError, the same on all ranks, names the ranks that had
    not arrived by the first deadline.
    """
    store.set(f"here/{rank}", "")
    names = range(size) if members is None else members
    report = WaitReport(f"rank {names[rank]}", deadline)

    def missing() -> str:
        ranks = [names[other] for other in range(size) if not store.check([f"here/{other}"])]
        return f"{ranks_text(ranks)} did not come to {name}"

    def check_and_tell() -> None:
        check()
        for gone in others.gone().intersection(names):
            if not store.check([f"here/{names.index(gone)}"]):
                raise others.peer_left(gone, name)
        report.look(missing)

    def give_up() -> str:
        return report.timed_out(missing())

    outcome = arrive(store, size, conclude, give_up, deadline, check_and_tell)
    if outcome != _GO.encode():
        raise RendezvousError(outcome.decode(errors="replace"))


def wait_for_ranks(
    store: Store,
    library: Library,
    name: str,
    rank: int,
    size: int,
    deadline: Deadline,
    check: Callable[[], None],
    others: OtherBackends = _ALONE,
    parent: Parent | None = None,
    members: Sequence[int] | None = None,
) -> bytes:
    """Meet all ranks of a new communicator; return its unique id. See `meet`."""
    if rank == 0:
        made = library.unique_id() if parent is None else parent.communicator.growth_id()
        store.set("id", made)
    conclude = functools.partial(_conclusion, store, name, size)
    meet(store, name, rank, size, deadline, check, others, conclude, members)
    return store.get("id")


def _conclusion(store: Store, name: str, size: int) -> str:
    """Return the permission to go on, or why a communicator can't grow to these ranks."""
    if not store.check([OLD]):
        return _GO
    places = {
        rank: store.get(f"{OLD}/{rank}").decode()
        for rank in range(size)
        if store.check([f"{OLD}/{rank}"])
    }
    wanted = {rank: f"{rank} of {len(places)}" for rank in range(len(places))}
    if places == wanted and len(places) < size:
        return _GO
    found = ", ".join(f"rank {rank} was {place}" for rank, place in places.items())
    return (
        f"{name} can't grow ({found}): all ranks of the group that grows name it by "
        "NcclOptions(grow_from=...), keep their numbers, and new ranks follow them"
    )
