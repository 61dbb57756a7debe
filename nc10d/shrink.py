"""Go on with the ranks that are left: they agree on who that is, and make a group of them.

Each survivor says in the group's store that it is there. When all have who are not known to be
dead, or the time is up, somebody writes down who goes on; the first list counts. A rank that is
not on it (it was stopped, and woke up) can't disturb the others: the new group has memory,
connections and keys of its own. If a member dies or stops meanwhile, the group is made on none of
them, and they agree anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nc10d.arguments import integer
from nc10d.deadline import Deadline, Timeout, seconds
from nc10d.errors import Aborted, DistError, PeerLost, RendezvousError, StoreTimeout
from nc10d.group import ProcessGroup
from nc10d.world import current_world, group_or_default, prefix_store

if TYPE_CHECKING:
    from nc10d.store.base import Store

PATIENCE = 5.0
"""Seconds that survivors wait for a rank that lives and does not say that it goes on.

So long, at least, they also wait for the members on their list to make the group: that takes time
even where nobody is waited for.
"""
_SLICE = 0.02
_MEMBERS, _OUTCOME = "members", "outcome"


def shrink_group(
    ranks_to_exclude: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout = PATIENCE,
) -> ProcessGroup:
    """Make a group of the ranks of `group` that are left, and close `group`; they all call.

    Ranks that have died or left go without saying; `ranks_to_exclude` (of `group`) are left out
    though they live, and don't call. So are those that have not called within `timeout` (seconds
    or timedelta) of this rank, and who calls and then stops for longer (5 s at least) while the
    group is made. Ranks keep their order and are numbered anew from 0. The default group's
    successor is the default group, and its ranks are the global ranks from then on; other groups
    that were made before keep the numbers of their time.

    Blocks until all survivors have come. Aborted on a rank that the others have gone on without;
    RendezvousError if ranks that live can't make a group; StoreError if the store is lost, too;
    TypeError for a backend that can't do this; ValueError for a rank that excludes itself or is
    not one of `group`.
    """
    old = group_or_default(group)
    if not isinstance(old, ProcessGroup):
        raise ValueError("shrink_group: this rank is not in the group")
    old.refuse_in_batch("shrink_group")
    backend: Any = old.backend(old.config.lookout)
    if not hasattr(backend, "shrink"):
        raise TypeError(f"the backend {backend.name!r} of {old!r} can't shrink a group")
    excluded = _excluded(old, ranks_to_exclude)
    new = _made(old, lambda: backend.gone() | excluded, seconds(timeout))
    world = current_world()
    default = old is world.default
    world.keep(new)
    world.forget(old)
    if default:
        world.default = new
    return new


def _excluded(group: ProcessGroup, ranks: Sequence[int] | None) -> set[int]:
    excluded = {integer("shrink_group", "a rank", rank) for rank in ranks or ()}
    unknown = sorted(rank for rank in excluded if not 0 <= rank < group.size)
    if unknown:
        raise ValueError(f"shrink_group: {group!r} has no rank {unknown[0]}")
    if group.rank in excluded:
        raise ValueError(f"shrink_group: rank {group.rank} can't exclude itself, only be excluded")
    return excluded


def _made(old: ProcessGroup, gone: Callable[[], set[int]], patience: float) -> ProcessGroup:
    """Try until a group is made; each further attempt has lost one more rank."""
    failure: DistError | None = None
    for number in range(1, old.size + 1):
        try:
            return _attempt(old, number, gone, patience)
        except (PeerLost, RendezvousError) as error:
            failure = error
    message = f"those who are left of group {old.name!r} could not make another: {failure}"
    raise RendezvousError(message, group=old.name) from failure


def _attempt(
    old: ProcessGroup, number: int, gone: Callable[[], set[int]], patience: float
) -> ProcessGroup:
    """Agree and form; PeerLost or RendezvousError on all members if one of them has not."""
    name = f"{old.name}/shrunk{number}"
    store = prefix_store(name, old.store)
    members = agree(store, old.size, old.rank, gone, Deadline.after(patience))
    if old.rank not in members:
        raise Aborted(
            f"the other ranks of group {old.name!r} have gone on without rank {old.rank}: "
            f"they are {members}",
            rank=old.rank,
            group=old.name,
        )
    # Who had to be waited for has used up that deadline: forming has one of its own.
    until = Deadline.after(max(patience, PATIENCE))
    try:
        new = old.successor(name, members, store, until)
    except BaseException:
        confirm(store, members, gone, False, until)
        raise
    if not confirm(store, members, gone, True, until):
        new.close()
        raise RendezvousError(f"not all of {members} have made the group {name!r}", group=name)
    return new


def agree(
    store: Store, size: int, rank: int, gone: Callable[[], set[int]], until: Deadline
) -> list[int]:
    """Return who goes on, the same list on every rank that asks; blocks until that is known.

    `gone` says who is known not to come, and may learn of more. Whoever has called by `until` is
    waited for no longer than that.
    """
    store.set(f"here/{rank}", "")
    while not store.check([_MEMBERS]):
        expected = [other for other in range(size) if other not in gone()]
        if _all_here(store, expected, until.slice(_SLICE)):
            _propose(store, expected)
        elif until.expired():
            _propose(store, [other for other in expected if store.check([f"here/{other}"])])
    members: list[int] = json.loads(store.get(_MEMBERS))
    return members


def confirm(
    store: Store, members: Sequence[int], gone: Callable[[], set[int]], made: bool, until: Deadline
) -> bool:
    """Say whether all members have `made` the group; the same answer on all who ask.

    Between hosts one may have all its connections when another can't get the last of its own. Who
    went on then would never meet the others again. Blocks until all have asked, one has failed, or
    a member has not asked by `until`.
    """
    if not made:
        store.compare_set(_OUTCOME, "", "failed")
    elif store.add("made", 1) == len(members):
        store.compare_set(_OUTCOME, "", "made")
    while not _there(store, [_OUTCOME], _SLICE):
        if until.expired() or gone().intersection(members):
            store.compare_set(_OUTCOME, "", "failed")
    return store.get(_OUTCOME) == b"made"


def _all_here(store: Store, ranks: Sequence[int], limit: float) -> bool:
    return _there(store, [f"here/{rank}" for rank in ranks], limit)


def _there(store: Store, keys: Sequence[str], limit: float) -> bool:
    try:
        store.wait(keys, limit)
    except StoreTimeout:
        # A store that is farther away than `limit` has had no time to say so.
        return store.check(keys)
    return True


def _propose(store: Store, members: Sequence[int]) -> None:
    store.compare_set(_MEMBERS, "", json.dumps(members))
