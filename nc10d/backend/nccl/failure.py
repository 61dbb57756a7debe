"""Failures: a late launch in words; any as text in the store, so that all ranks raise the same."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nc10d.base import error_wire
from nc10d.errors import CollectiveTimeout, DistError

if TYPE_CHECKING:
    from nc10d.backend.base import OtherBackends
    from nc10d.backend.nccl.comm.comm_streams import GroupIdentity
    from nc10d.backend.nccl.works import NcclWork
    from nc10d.store.base import Store

KEY = "cause"


def publish(store: Store, cause: DistError) -> DistError:
    """Tell the others a cause; return the one that holds: the first that anybody told."""
    mine = error_wire.written(cause)
    said = store.compare_set(KEY, "", mine)
    return cause if said == mine else error_wire.read(said)


def published(store: Store) -> DistError | None:
    """Return the cause that somebody has told, if anybody has; never blocks."""
    return error_wire.read(store.get(KEY)) if store.check([KEY]) else None


def timeout_of(identity: GroupIdentity, work: NcclWork, others: OtherBackends) -> CollectiveTimeout:
    """Return the failure of a launch that has not ended by its deadline."""
    name = work._describe()
    what = f"{name} #{work.seq} of rank {identity.rank} in group {identity.group!r}"
    where = "has waited for other ranks to come" if work.submitted else "is still under way"
    latest, last = others.whereabouts()
    return CollectiveTimeout(
        f"{what} {where} at its timeout{latest}",
        rank=identity.rank,
        pid=os.getpid(),
        group=identity.group,
        op=name,
        seq=work.seq,
        last=last or None,
    )
