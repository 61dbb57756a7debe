"""c10d's module `distributed_c10d`: all public names of nc10d, and private ones that programs use.

    from nc10d.distributed_c10d import _get_default_group, ProcessGroup

These libraries were looked at for their use of private names: ignite, mmengine, fairscale,
detectron2, timm.
"""

from __future__ import annotations

from typing import Any

import nc10d
from nc10d.api.old_names import warn_deprecated
from nc10d.api.queries import set_timeout
from nc10d.base.deadline import Timeout
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import (
    Group,
    NonMember,
    abort_process_group,
    current_world,
    get_default_group,
    group_or_default,
)
from nc10d.store.base import Store

__all__ = [
    *("_abort_process_group", "_all_gather_base", "_broadcast_coalesced", "_coalescing_manager"),
    *("_get_default_group", "_get_default_store", "_get_global_rank", "_get_group_size"),
    *("_get_process_group_name", "_get_process_group_store", "_rank_not_in_group"),
    *("_reduce_scatter_base", "_resolve_process_group", "_set_pg_timeout", "_world"),
]

_get_default_group = get_default_group
_abort_process_group = abort_process_group


def __getattr__(name: str) -> Any:
    if name in nc10d.__all__ or name == "group":
        return getattr(nc10d, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _get_default_store() -> Store:
    """Return the default group's store, which has this world's keys only."""
    return get_default_group().store


def _get_global_rank(group: Group, rank: int) -> int:
    """Return the global rank of a rank in `group`; deprecated."""
    warn_deprecated("distributed_c10d._get_global_rank", "get_global_rank")
    return nc10d.get_global_rank(group, rank)


def _get_group_size(group: Group) -> int:
    """Return the number of ranks in `group`."""
    return group_or_default(group).size()


def _get_process_group_name(pg: ProcessGroup) -> str:
    """Return a group's name."""
    return pg.name()


def _get_process_group_store(pg: ProcessGroup) -> Store:
    """Return a group's store."""
    return pg.store


def _resolve_process_group(group_name: str) -> ProcessGroup:
    """Return this rank's group with this name; RuntimeError if there is none."""
    found = current_world().groups.get(group_name)
    if found is None:
        raise RuntimeError(f"there is no group {group_name!r} on this rank")
    return found


def _rank_not_in_group(group: Group) -> bool:
    """Return whether a group is GroupMember.NON_GROUP_MEMBER: this rank is not a member."""
    return isinstance(group, NonMember)


def _set_pg_timeout(timeout: Timeout, group: Group = None) -> None:
    """Set the timeout of later operations of `group`; deprecated."""
    warn_deprecated("distributed_c10d._set_pg_timeout", "set_timeout")
    set_timeout(timeout, group)


class _World:
    """This rank's groups as c10d's tables; each is a new dict."""

    @property
    def default_pg(self) -> ProcessGroup | None:
        """The default group, or None."""
        return current_world().default

    @property
    def pg_map(self) -> dict[ProcessGroup, tuple[str, Store]]:
        """The backend's name and the store of each group."""
        return {pg: (pg.backend_name, pg.store) for pg in current_world().groups.values()}

    @property
    def pg_names(self) -> dict[ProcessGroup, str]:
        """Each group's name."""
        return {pg: pg.name() for pg in current_world().groups.values()}

    @property
    def pg_group_ranks(self) -> dict[ProcessGroup, dict[int, int]]:
        """The rank in each group of each global rank."""
        return {pg: dict(pg.numbers) for pg in current_world().groups.values()}


_world = _World()
