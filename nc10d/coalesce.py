"""Coalescing blocks on a group or on the default one; what a block does is written in batch."""

from __future__ import annotations

from typing import Any

from nc10d.batch import CoalescingManager
from nc10d.group import ProcessGroup
from nc10d.world import group_or_default

__all__ = ["CoalescingManager", "_coalescing_manager", "coalescing_manager"]


def coalescing_manager(
    group: ProcessGroup | None = None, device: Any = None, async_ops: bool = False
) -> CoalescingManager:
    """Collect this thread's calls on `group` in a with-block and launch them once at its end.

    The end of the block blocks until all are done; with `async_ops` it does not, and the block's
    `wait()` does. `device` is accepted for c10d's sake: the arrays say where they are.
    """
    return CoalescingManager(group_or_default(group), async_ops)


_coalescing_manager = coalescing_manager
