"""Groups of some of the ranks: `new_group` and the calls built on it.

Every rank of the default group makes the same calls in the same order, also for groups without
that rank; call_agreement.py compares them. A call blocks the members until all of them have called.
A new group's CPU backend is split off its parent's; with a `device_id` so are NCCL's communicators
for new groups of all ranks, which then all wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from nc10d.arrays.arguments import check_distinct_ranks, integer
from nc10d.base.deadline import Deadline, Timeout
from nc10d.base.text import digest
from nc10d.group.call_agreement import LOCAL
from nc10d.group.process_group import ProcessGroup, terms
from nc10d.group.world import (
    GroupMember,
    NonMember,
    current_world,
    get_default_group,
    group_or_default,
)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonMember | None:
    """Make a group of global `ranks` (None: all); every rank calls, in the same order.

    Ranks are numbered in ascending order, or as given without `sort_ranks`. Other ranks get
    GroupMember.NON_GROUP_MEMBER. With `use_local_synchronization` the members alone call, and
    other ranks that call get None. `timeout` (seconds or timedelta) bounds this call and, by
    default, the group's operations; `timeout`, `backend` and `pg_options` (see
    init_process_group) default to the default group's.

    A group lives as long as the program keeps it, or its operations are in flight. A dropped group
    gives its resources back without the other ranks; with NCCL or MPI, which need these, when the
    default group is destroyed.

    If the ranks' calls differ (another list, order, or number of calls before), CollectiveMismatch
    on all ranks, which names two ranks and their lists; the default group has failed then. Calls by
    the members alone without `use_local_synchronization` are such a difference: it shows when the
    other ranks make their next group. With it, calls have no common order. A member that waits in
    vain tells in its RendezvousError which lists the others gave.

    Before anything is sent: ValueError for duplicate or unknown ranks, TypeError for ranks that
    are no integers and for options that the backend does not know. If a member does not come in
    time, RendezvousError on the others; if a member has died or left, PeerLost at once. The group
    then exists on no rank, and its resources are released.
    """
    parent = get_default_group()
    parent.refuse_in_batch("new_group")
    members = _members(parent, ranks, sort_ranks)
    arguments = timeout, backend, pg_options, group_desc, device_id
    if not use_local_synchronization:
        return make_groups(f"new_group({[*members]})", [members], *arguments)[0]
    if parent.rank not in members:
        return None
    call = f"new_group({[*members]}, {LOCAL})"
    terms(parent, timeout, backend, pg_options)
    with parent.failed_by_interrupt(call):
        count = parent.calls.number_local(members, call)
    with parent.calls.told_on_failure(members, call):
        return _join(f"{parent.name}/local-{digest(repr(members))}-{count}", members, *arguments)


def _join(
    name: str,
    members: Sequence[int],
    timeout: Timeout,
    backend: str | None,
    options: object,
    description: str | None,
    device: object,
    lists: Sequence[Sequence[int]] = (),
) -> ProcessGroup:
    """Make a group that this rank is in, one of `lists`; blocks until all members have come."""
    parent = get_default_group()
    limit, config = terms(parent, timeout, backend, options)
    deadline = Deadline.after(limit)
    group = parent.child(name, members, limit, config, options, description)
    if device is not None:
        group.device_id = device
    group._split_off_from(parent, lists, deadline)
    return current_world().add(group, deadline)


def make_groups(
    call: str,
    lists: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: str | None = None,
    options: object = None,
    description: str | None = None,
    device: object = None,
) -> list[ProcessGroup | NonMember]:
    """Make a group for each list of global ranks, in a single `call` (a text) by all ranks."""
    parent = get_default_group()
    parent.refuse_in_batch(call.partition("(")[0])
    lists = [_members(parent, ranks, sort_ranks=False) for ranks in lists]
    terms(parent, timeout, backend, options)  # wrong arguments must not count as a call
    first = parent.agree_on_call(call, len(lists))
    arguments = timeout, backend, options, description, device
    return [
        _join(f"{parent.name}/{number}", ranks, *arguments, lists)
        if parent.rank in ranks
        else GroupMember.NON_GROUP_MEMBER
        for number, ranks in enumerate(lists, first)
    ]


def _members(
    parent: ProcessGroup, ranks: Sequence[int] | None, sort_ranks: bool
) -> tuple[int, ...]:
    if ranks is None:
        return parent.ranks
    members = _ranks("new_group", ranks)
    members = tuple(sorted(members)) if sort_ranks else members
    if not members:
        raise ValueError("a group needs at least one rank, got an empty list")
    if len(set(members)) != len(members):
        raise ValueError(f"ranks must not contain duplicates, got {list(members)}")
    for member in members:
        parent.group_rank(member)
    return members


def _ranks(call: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return plain ints: ranks are part of group names, and NumPy's integers print differently."""
    return tuple(integer(call, "ranks", rank) for rank in ranks)


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonMember | None, list[ProcessGroup | NonMember | None]]:
    """Cut the ranks of `group` into runs of `group_size`; return (this rank's group, all groups).

    Every rank of the default group calls. `group_size` must divide the size of `group`
    (ValueError). Without it, the LOCAL_WORLD_SIZE ranks of each host form a group. The other
    arguments, blocking and errors are those of new_group.
    """
    whole = group_or_default(group)
    if group_size is None:
        size = _ranks_per_host()
    else:
        size = integer("new_subgroups", "group_size", group_size)
    if size < 1 or whole.size % size:
        raise ValueError(f"group_size must divide the group's size {whole.size}, got {size}")
    runs = [whole.ranks[start : start + size] for start in range(0, whole.size, size)]
    return new_subgroups_by_enumeration(runs, timeout, backend, pg_options, group_desc)


def _ranks_per_host() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None:
        raise ValueError("new_subgroups needs a group_size: LOCAL_WORLD_SIZE is not set")
    return int(text)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonMember | None, list[ProcessGroup | NonMember | None]]:
    """Make a group per list of global ranks; return (this rank's group or None, all groups).

    Every rank of the default group calls. The lists must not overlap: ValueError. The other
    arguments, blocking and errors are those of new_group.
    """
    lists = [_ranks("new_subgroups_by_enumeration", ranks) for ranks in ranks_per_subgroup_list]
    if not lists:
        raise ValueError("ranks_per_subgroup_list must not be empty")
    check_distinct_ranks(lists)
    members = [_members(get_default_group(), ranks, sort_ranks=True) for ranks in lists]
    call = f"new_subgroups({[[*ranks] for ranks in members]})"
    groups = make_groups(call, members, timeout, backend, pg_options, group_desc)
    joined = [group for group in groups if isinstance(group, ProcessGroup)]
    return (joined[0] if joined else None), [*groups]


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split `parent_pg` into groups by lists of ranks in it; return this rank's group or None.

    Every rank of `parent_pg` calls with the same lists, which must be disjoint and not empty
    (ValueError). Ranks are numbered in ascending order. A rank in no list gets None. `timeout`,
    `backend` and `pg_options` default to the parent's. Blocks each group's members until all have
    called; raises as new_group does.
    """
    parent = group_or_default(parent_pg, "parent_pg")
    group = parent.split_group(split_ranks, timeout, pg_options, group_desc, backend)
    return None if group is None else current_world().keep(group)
