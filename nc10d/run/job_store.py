"""The store in which a job's ranks meet, hosted by the launcher of node 0.

The launcher outlives every rank and every restart, so the store does too, and all ranks are
clients alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nc10d.run.environment import LaunchedJob


@contextlib.contextmanager
def hosted_store(job: LaunchedJob) -> Iterator[int]:
    """Give the port on which ranks meet; on node 0 a store listens there until the block ends.

    StoreError if the port is taken.
    """
    if job.node_rank != 0:
        yield job.master_port
        return
    from nc10d.store import TCPStore

    store = TCPStore(job.master_addr, job.master_port, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        store.close()
