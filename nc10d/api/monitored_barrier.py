"""A barrier that names the ranks that have not come.

Each rank counts its arrivals in the group's store, then enters two ordinary barriers. If all ranks
come, each writes to the store once and never reads it. A rank whose time is up reads the counts of
all ranks: a rank with fewer arrivals than its own is missing. It fails the group with that finding,
so every rank raises the same message, and so does a rank that comes later. No rank has a special
role. If a rank has died or makes another call, the barriers themselves fail at once.
"""

from __future__ import annotations

from nc10d.base.deadline import Timeout, seconds
from nc10d.base.signal_errors import suppress_here
from nc10d.base.text import in_seconds, members_text
from nc10d.errors import CollectiveTimeout
from nc10d.group.world import Group, NonMember, group_or_default, warn_non_member
from nc10d.ops import Barrier

_KEY = "monitored_barrier"


def monitored_barrier(
    group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """Block until every rank in the group has called; after `timeout`, name the missing ranks.

    `timeout` (seconds or timedelta) defaults to the group's. When it is over, the group fails with
    a CollectiveTimeout that names all missing ranks. `wait_all_ranks` changes nothing: without it,
    c10d names only the first missing rank. PeerLost if a rank dies meanwhile, StoreError if the
    store can't be reached. ValueError for a group without a backend for cpu arrays, and inside a
    coalescing block. A call costs a request to the store: it is meant for finding faults.
    """
    found = group_or_default(group)
    if isinstance(found, NonMember):
        warn_non_member("monitored_barrier", 3)
        return
    found.refuse_in_batch("monitored_barrier")
    if "cpu" not in found.config.devices:
        raise ValueError(f"monitored_barrier needs a backend for cpu arrays; {found!r} has none")
    limit = found.timeout if timeout is None else seconds(timeout)
    arrivals = found.store.add(f"{_KEY}/{found.rank}", 1)
    # Twice the time: the barriers must end by a rank's finding, not by their own timeout.
    # Two barriers: a rank that comes after the others gave up passes the first, never the second.
    work = found.launch((Barrier(), Barrier()), "cpu", async_op=True, timeout=2 * limit)
    assert work is not None, "an asynchronous call has a work"
    # By this wait, or by a peer's finding, which the second wait raises.
    with suppress_here(CollectiveTimeout):
        work.wait(limit)
        return
    missing: list[int] = []
    if not work.is_completed():  # a missing rank has arrived less often than this rank
        counts = [found.store.add(f"{_KEY}/{rank}", 0) for rank in range(found.size)]
        missing = [rank for rank, count in enumerate(counts) if count < arrivals]
    if missing:
        message = (
            f"monitored_barrier timed out on {members_text(found.ranks, [found.rank])} after "
            f"{in_seconds(limit)}: {members_text(found.ranks, missing)} of group {found.name!r} "
            "did not come"
        )
        found.abort(CollectiveTimeout(message, rank=missing[0], op="monitored_barrier"))
    work.wait()  # raises the finding; if all came at the last moment, the barriers are ending
