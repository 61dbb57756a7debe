"""torch.distributed and nc10d on the same groups: both default groups, and torch groups of nc10d's.

Collectives by either library have one order on such a group. Destroying one destroys the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nc10d.base.deadline import Timeout, seconds
from nc10d.base.torch_registration import NAME
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import close_at_exit, current_world, group_or_default
from nc10d.store import Store
from nc10d.torch.backend.groups import group_of
from nc10d.torch.stores import as_store


@dataclass(frozen=True, slots=True)
class Adopted:
    """The `pg_options` of a torch group on a group of nc10d that exists already."""

    group: ProcessGroup


def init_process_group(
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | dist.Store | None = None,
    pg_options: object = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Make torch.distributed's default group on nc10d, and nc10d's default group: the same one.

    The arguments are those of torch.distributed.init_process_group; `timeout` may be in seconds,
    and `store` a store of nc10d. Blocks and raises as torch's function does; ValueError if nc10d
    has a default group already: as_torch_group makes its torch group.
    """
    world = current_world()
    if world.default is not None:
        raise ValueError("nc10d has a default group: nc10d.torch.as_torch_group() gives it torch's")
    dist.init_process_group(
        NAME,
        init_method,
        None if timeout is None else _delta(seconds(timeout)),
        world_size,
        rank,
        store if store is None else as_store(store),
        pg_options=pg_options,
        device_id=device_id,
    )
    world.default = world.keep(group_of())
    close_at_exit()


def as_torch_group(group: ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return a torch group of the ranks of `group`, on which torch.distributed's calls run.

    All ranks of `group` call. For nc10d's default group (or None) it becomes torch.distributed's
    default group, which every other torch group needs first. ValueError for ranks outside `group`.
    """
    found = group_or_default(group)
    if not isinstance(found, ProcessGroup):
        raise ValueError("as_torch_group: this rank is not in the group")
    return on_default(found) if found is current_world().default else on_members(found)


def on_default(group: ProcessGroup) -> dist.ProcessGroup:
    """Make torch.distributed's default group on `group`, and return it."""
    place = {"rank": group.rank(), "world_size": group.size()}
    options = {"timeout": _delta(group.timeout), "pg_options": Adopted(group)}
    dist.init_process_group(NAME, store=as_store(group.store), **options, **place)
    return dist.group.WORLD


def on_members(group: ProcessGroup) -> dist.ProcessGroup:
    """Return a torch group on `group`, whose members are ranks of torch's default group."""
    options = {"use_local_synchronization": True, "sort_ranks": False}
    return dist.new_group([*group.ranks], _delta(group.timeout), NAME, Adopted(group), **options)


def _delta(limit: float) -> timedelta:
    return timedelta(seconds=min(limit, timedelta(days=24).total_seconds()))
