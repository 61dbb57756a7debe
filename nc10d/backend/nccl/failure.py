"""The error of a late launch, and errors published in the store, so that all ranks raise it."""

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
    """Publish an error for all ranks; return the first error that any rank has published."""
    own_text = error_wire.encode_error(cause)
    first = store.compare_set(KEY, "", own_text)
    return cause if first == own_text else error_wire.decode_error(first)


def published(store: Store) -> DistError | None:
    """Return the error that a rank has published, None if none has; never blocks."""
    return error_wire.decode_error(store.get(KEY)) if store.check([KEY]) else None


def timeout_of(identity: GroupIdentity, work: NcclWork, others: OtherBackends) -> CollectiveTimeout:
    """Return the failure of a launch that has not ended by its deadline."""
    name = work._describe()
    call = f"{name} #{work.seq} of rank {identity.rank} in group {identity.group!r}"
    state = "has waited for other ranks to come" if work.submitted else "is still under way"
    latest, last = others.whereabouts()
    return CollectiveTimeout(
        f"{call} {state} at its timeout{latest}",
        rank=identity.rank,
        pid=os.getpid(),
        group=identity.group,
        op=name,
        seq=work.seq,
        last=last or None,
    )
