"""Where gradients lie at a time: a plan, its memory, and its schedule; and how such are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nc10d.ops import Array
from nc10d.reducer.bucket import Allocation
from nc10d.reducer.plan import BucketPlan, ReducePlan, Spec, plan_buckets
from nc10d.reducer.schedule import Schedule
from nc10d.reducer.settings import Settings
from nc10d.reducer.storage import Storage

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

_NAME = 24
"""How many characters of a parameter's name a bucket is called by."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Buckets as they are planned, in memory, and on their way."""

    plan: ReducePlan
    storage: Storage
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class BucketLayouts:
    """Makes the layouts of one Reducer, the `number`th of its group."""

    parameters: Sequence[Array]
    specs: Sequence[Spec]
    settings: Settings
    allocate: Allocation
    group: ProcessGroup
    number: int

    def make(self, order: Sequence[int] | None = None) -> BucketLayout:
        """Lay buckets out in the order in which gradients arrive, if that is known."""
        chosen = self.settings
        caps = chosen.cap_bytes, chosen.first_bytes
        plan = plan_buckets(self.specs, *caps, expect_sparse=chosen.sparse, order=order)
        schedule = Schedule([bucket.params for bucket in plan.buckets], chosen.names)
        return BucketLayout(plan, self.storage(plan), schedule)

    def storage(self, plan: ReducePlan) -> Storage:
        """Return new memory for a plan, with zeros in it."""
        purposes = [self._purpose(index, bucket) for index, bucket in enumerate(plan.buckets)]
        names = self.settings.names
        return Storage(plan, self.parameters, self.allocate, purposes, names, self.group)

    def _purpose(self, index: int, bucket: BucketPlan) -> str:
        """Return what the call that reduces a bucket is for; short, as errors show both sides."""
        first = self.settings.names[bucket.params[0]][-_NAME:]
        return f"bucket {index} of reducer {self.number} ({first})"
