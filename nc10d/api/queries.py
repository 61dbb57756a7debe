"""Queries about groups: ranks, sizes, backends, timeouts; and coalescing blocks.

`group` is a ProcessGroup, None for the default group, or GroupMember.NON_GROUP_MEMBER, for which
`get_rank` and `get_world_size` return -1 and other calls raise ValueError. No query blocks.
"""

from __future__ import annotations

import os
from datetime import timedelta

from nc10d.arrays.dtypes import DType, allows
from nc10d.arrays.op_advice import advice_for
from nc10d.backend.protocol import Backend
from nc10d.base.deadline import Timeout
from nc10d.group.coalescing import CoalescingManager
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import DEFAULT_TIMEOUT, Group, NonMember, current_world, group_or_default
from nc10d.ops import ReduceOp

default_pg_timeout = default_timeout = timedelta(seconds=DEFAULT_TIMEOUT)
"""Operations' timeout unless init_process_group gets another."""


def _member(group: Group) -> ProcessGroup:
    """Return the group; ValueError for GroupMember.NON_GROUP_MEMBER."""
    if isinstance(group, NonMember):
        raise ValueError("this rank is not in the group")
    return group_or_default(group)


def is_available() -> bool:
    """Return True: nc10d has no build without collectives."""
    return True


def is_initialized() -> bool:
    """Return whether there is a default group."""
    return current_world().default is not None


def is_torchelastic_launched() -> bool:
    """Return whether an elastic launcher (torchrun, nc10d.run) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_rank(group: Group = None) -> int:
    """Return this process's rank in `group`; -1 if this process is not a member."""
    return group_or_default(group).rank()


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in `group`; -1 if this rank is not a member."""
    return group_or_default(group).size()


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return LOCAL_RANK, this process's rank on its host, else `fallback_rank`.

    RuntimeError if neither is set.
    """
    text = os.environ.get("LOCAL_RANK")
    if text is not None:
        return int(text)
    if fallback_rank is None:
        raise RuntimeError("LOCAL_RANK is not set: start with a launcher, or pass fallback_rank")
    return int(fallback_rank)


def get_backend(group: Group = None) -> str:
    """Return the backend's name in lower case, as given when `group` was made.

    "gloo" if none was named: programs that choose between "gloo" and "nccl" then use arrays in host
    memory, which work on every machine. get_backend_config() lists the backends themselves.
    """
    return _member(group).backend_name


def get_backend_config(group: Group = None) -> str:
    """Return the backends of `group` as "device:backend" pairs, separated by commas."""
    return repr(_member(group).config)


def get_backend_impl(group: Group = None, device: object = None) -> Backend:
    """Return the backend of `group` for a device; without one, for operations without an array.

    Making a backend may block until all ranks call, as a first operation would.
    """
    found = _member(group)
    kind = str(getattr(device, "type", device)).partition(":")[0]
    return found.backend(found.config.first if device is None else kind)


def set_timeout(timeout: Timeout, group: Group = None) -> None:
    """Set the timeout, in seconds or as timedelta, for later operations of `group`."""
    _member(group).set_timeout(timeout)


def get_pg_count() -> int:
    """Return the number of groups that this rank is in."""
    return len(current_world().groups)


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Return whether arrays of complex numbers can be reduced by an operation.

    PRODUCT is among them: nc10d multiplies complex numbers, c10d their parts. TypeError for what is
    no ReduceOp.
    """
    if not isinstance(reduceOp, ReduceOp):
        raise TypeError(f"reduceOp must be a ReduceOp, got {reduceOp!r}{advice_for(reduceOp)}")
    return allows(DType.COMPLEX128, reduceOp)


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of `group`, in the order of their group ranks."""
    return list(_member(group).ranks)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the global rank of a rank in `group`; ValueError if there is none."""
    return _member(group).global_rank(group_rank)


def get_group_rank(group: Group, global_rank: int) -> int:
    """Return the rank in `group` of a global rank; ValueError if it is not a member."""
    return _member(group).group_rank(global_rank)


def coalescing_manager(
    group: ProcessGroup | None = None, device: object = None, async_ops: bool = False
) -> CoalescingManager:
    """Collect this thread's calls on `group` in a with-block and launch them together at its end.

    The block's end waits until all are done; with `async_ops`, only the manager's `wait()` does.
    `device` is accepted as in c10d and ignored: each array has its device.
    """
    return CoalescingManager(group_or_default(group), async_ops)


_coalescing_manager = coalescing_manager
