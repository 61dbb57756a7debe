"""Give every rank the values that the owners of arrays have computed."""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.arrays.buffer import as_buffer
from nc10d.group.coalescing import Plan
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array


class Shares:
    """Arrays of equal shapes on all ranks; rank `owners[i]` has the value of `arrays[i]`.

    All ranks give the same owners, and arrays in the same order. Arrays may be on several devices,
    for which the group has backends, and may move to other memory between calls.
    """

    def __init__(self, arrays: Sequence[Array], owners: Sequence[int], group: ProcessGroup) -> None:
        self._group = group
        self._calls: dict[str, list[tuple[Array, int]]] = {}
        for x, owner in zip(arrays, owners, strict=True):
            memory = as_buffer(x)
            if memory.count:
                self._calls.setdefault(memory.device, []).append((x, owner))
        self._plans: list[Plan] = []

    def share(self) -> None:
        """Send every array from its owner to all ranks, as a single submission per device.

        All ranks call. Blocks for arrays on the CPU; on a device, in stream order. DistErrors as
        in every collective.
        """
        if self._plans:
            for plan in self._plans:
                plan.launch()
            return
        for _device, calls in sorted(self._calls.items()):
            with self._group.coalescing_manager() as block:
                for x, owner in calls:
                    self._group.broadcast(x, owner)
            self._plans.append(block.plan())
