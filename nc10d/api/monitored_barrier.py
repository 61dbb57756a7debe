"""A barrier that says who has not come.

Each rank counts its arrivals in the group's store, then enters ordinary barriers. While all goes
well the store is written to once and never read. A rank whose time is up reads everybody's count:
who has fewer arrivals than itself is missing. It makes that the group's failure, so that every
rank raises the same words, those who come later too. No rank is more needed than others for this;
where ranks have died or make other calls instead, the barriers themselves say so, and at once.
"""

from __future__ import annotations

import contextlib
import warnings

from nc10d.base.deadline import Timeout, seconds
from nc10d.errors import CollectiveTimeout
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import Group, NonMember, group_or_default
from nc10d.ops import Barrier
from nc10d.work import Work

_KEY = "monitored_barrier"


def monitored_barrier(
    group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """Block until every rank of the group has called; name those who have not after `timeout`.

    `timeout` (seconds or timedelta) is the group's unless given. When it is over, the group fails
    with a CollectiveTimeout that names all missing ranks; `wait_all_ranks` is accepted for c10d's
    sake, which without it names the first only. PeerLost if a rank dies meanwhile, StoreError if
    the store can't be reached. ValueError for a group without a backend for cpu arrays, and inside
    a coalescing block. It costs a request to the store: meant for finding faults.
    """
    found = group_or_default(group)
    if isinstance(found, NonMember):
        message = "monitored_barrier: this rank is not in the group, so the call does nothing"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return
    found.refuse_in_batch("monitored_barrier")
    if "cpu" not in found.config.devices:
        raise ValueError(f"monitored_barrier needs a backend for cpu arrays; {found!r} has none")
    limit = found.timeout if timeout is None else seconds(timeout)
    arrivals = found.store.add(f"{_KEY}/{found.rank}", 1)
    # Twice the time: the barrier is to end by this rank's judgement or a peer's, not by its own.
    # Two rounds: who comes after the others have given up finds their marks of the first one only.
    work = found.launch((Barrier(), Barrier()), "cpu", async_op=True, timeout=2 * limit)
    assert work is not None, "an asynchronous call has a work"
    _wait(found, work, limit, arrivals)


def _wait(group: ProcessGroup, work: Work, limit: float, arrivals: int) -> None:
    """Wait for the barrier; when the time is up, fail the group if somebody is missing."""
    with contextlib.suppress(CollectiveTimeout):  # by this wait, or a peer's finding: see below
        work.wait(limit)
        return
    missing = [] if work.is_completed() else _missing(group, arrivals)
    if missing:
        group.abort(_late(group, missing, limit))
    work.wait()  # raises what was found; or all came at the last moment, and the barrier is ending


def _missing(group: ProcessGroup, arrivals: int) -> list[int]:
    """Return the ranks that have arrived less often than this one."""
    counts = [group.store.add(f"{_KEY}/{rank}", 0) for rank in range(group.size)]
    return [rank for rank, count in enumerate(counts) if count < arrivals]


def _late(group: ProcessGroup, missing: list[int], limit: float) -> CollectiveTimeout:
    ranks = "rank" if len(missing) == 1 else "ranks"
    numbers = ", ".join(map(str, missing))
    message = (
        f"{ranks} {numbers} of group {group.name!r} did not come to monitored_barrier within "
        f"{limit:g} s of rank {group.rank}"
    )
    return CollectiveTimeout(message, rank=missing[0], op="monitored_barrier")
