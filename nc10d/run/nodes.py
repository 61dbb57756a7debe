"""The job's store, and how the launchers of several nodes agree on their ranks.

Node 0 hosts the store for as long as its launcher lives. The launcher outlives every rank and every
restart, so all ranks are clients alike.

With several nodes, each launcher writes its number of ranks to the store and reads the others'.
Nodes without --node-rank are numbered as they arrive. The node that has the store's address and
gets the port is node 0.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

from nc10d.base.resolve import resolve
from nc10d.base.stored import read_number
from nc10d.errors import StoreError, StoreTimeout
from nc10d.run.environment import LaunchedJob
from nc10d.run.launch_options import LaunchRequest
from nc10d.store import PrefixStore, Store, TCPStore
from nc10d.store.hosting import PortTaken

QUIET = 3.0
"""Seconds of waiting for other nodes before the launcher reports this."""
_MOST_RANKS = 1 << 20


@contextlib.contextmanager
def joined(
    request: LaunchRequest, say: Callable[[str], None], same_user: bool = False
) -> Iterator[LaunchedJob]:
    """Yield the job as the nodes have agreed on it; the store is served until the block ends.

    Blocks until all nodes have come, at most `request.patience` seconds. With `same_user` the store
    serves clients of this user on this machine without a token, too. StoreError if the store
    cannot be hosted or reached, or if nodes are missing.
    """
    job = request.job
    hosts = job.node_rank == 0 and not (request.by_arrival and not is_local(job.master_addr))
    store, hosts = _open(request, hosts, same_user)
    try:
        job = replace(job, master_port=store.port)
        yield job if job.nnodes == 1 else _agree(request, job, store, hosts, say)
    finally:
        store.close()


def _open(request: LaunchRequest, hosts: bool, same_user: bool) -> tuple[TCPStore, bool]:
    """Return the store, and whether this node hosts it."""
    job = request.job
    where = job.master_addr, job.master_port
    if hosts:
        try:
            store = TCPStore(*where, is_master=True, wait_for_workers=False, same_user=same_user)
        except PortTaken as error:
            if not request.by_arrival:
                raise StoreError(f"cannot host the store: {error}") from error
        except StoreError as error:
            raise StoreError(f"cannot host the store: {error}") from error
        else:
            return store, True
    try:
        return TCPStore(*where, timeout=request.patience), False
    except StoreError as error:
        raise StoreError(f"cannot reach node 0: {error}") from error


def _agree(
    request: LaunchRequest, job: LaunchedJob, store: Store, hosts: bool, say: Callable[[str], None]
) -> LaunchedJob:
    """Return the job with this node's rank and every node's number of ranks."""
    common = PrefixStore(f"nc10d-run/{job.run_id}", store)
    if request.by_arrival:
        node = 0 if hosts else common.add("arrivals", 1)
        if node >= job.nnodes:
            raise StoreError(f"all {job.nnodes} nodes are there already, this is one too many")
        job = replace(job, node_rank=node)
    common.set(str(job.node_rank), str(job.nproc))
    keys = [str(node) for node in range(job.nnodes)]
    try:
        common.wait(keys, min(QUIET, request.patience))
    except StoreTimeout:
        say(f"nc10d-run: waiting for {_missing(common, keys)}\n")
        try:
            common.wait(keys, max(0.001, request.patience - QUIET))
        except StoreTimeout as error:
            late = f"{_missing(common, keys)} did not come within {request.patience:g} s"
            raise StoreError(
                f"{late}: start it with the same --rdzv-endpoint, --rdzv-id and --nnodes, or wait "
                "longer by --rdzv-conf timeout=SECONDS"
            ) from error
    texts = zip(keys, common.multi_get(keys), strict=True)
    return replace(job, counts=tuple(read_number(*text, 1, _MOST_RANKS) for text in texts))


def _missing(store: Store, keys: list[str]) -> str:
    missing = [key for key in keys if not store.check([key])]
    return f"node{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {len(keys)}"


def is_local(host: str) -> bool:
    """Return whether `host`, an address or a name, is this machine's."""
    with contextlib.suppress(OSError):
        found = resolve(host, 0)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.bind(found[0][4])
            return True
    return False
