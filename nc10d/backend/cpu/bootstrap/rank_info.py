"""Rank info: each rank publishes it in the store before the ranks connect."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nc10d.backend.cpu.bootstrap.heartbeats import Renewal
from nc10d.backend.cpu.memory import proc
from nc10d.base.deadline import Deadline
from nc10d.base.stored import read_json, whole
from nc10d.base.text import ranks_text
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError
from nc10d.kernels.cache_dir import matching
from nc10d.store.arrival import await_ranks

if TYPE_CHECKING:
    from nc10d.store.base import Store


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The published facts about a rank.

    `socket` names the abstract Unix socket. The rank may run on `cores`, and use `quota` of them.
    `read_from` and `write_from` are the CPU's thresholds in bytes (`group_shape.Thresholds`).
    """

    rank: int
    host_id: str
    host: str
    pid: int
    socket: str
    secret: str
    version: str
    process: str
    cores: list[int]
    quota: float
    read_from: int
    write_from: int


SHARED_CODE = ("bootstrap/rank_info.py", "program/*.py", "algorithms/*.py", "native/*.py")
"""Files (patterns, in backend/cpu) that must be the same on all ranks."""


@functools.cache
def version() -> str:
    """Return a digest over the code that must be equal on all ranks: programs and memory layout."""
    digest = hashlib.sha256()
    for path in matching(Path(__file__).parents[1], SHARED_CODE):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def host_id() -> str:
    """Return an id that is equal on ranks that can share memory: boot and network namespace."""
    override = os.environ.get("NC10D_HOST_ID")
    if override:
        return override
    return f"{proc.read('sys/kernel/random/boot_id').strip()}/{proc.namespace('net')}"


def exchange_infos(
    store: Store, prefix: str, info: RankInfo, size: int, deadline: Deadline
) -> list[RankInfo]:
    """Publish this rank's info and return all ranks' infos; blocks until all are there.

    A rank that compiles is waited for beyond the deadline. RendezvousError names the ranks that are
    late, or that run another nc10d version; StoreError names the key of a malformed info.
    """
    keys = [f"{prefix}/info/{rank}" for rank in range(size)]
    store.set(keys[info.rank], as_text(info))
    report = WaitReport(f"rank {info.rank} of {size}", deadline, keys[0])
    renewed = Renewal(store, deadline)
    await_ranks(store, keys, report, _not_ready, deadline, renewed=renewed)
    texts = dict(zip(keys, store.multi_get(keys), strict=True))
    versions = [
        read_json(key, text, lambda fields: fields["version"]) for key, text in texts.items()
    ]
    other = [rank for rank, version in enumerate(versions) if version != info.version]
    if other:
        raise RendezvousError(
            f"{ranks_text(other)}: another version of nc10d than on rank {info.rank}; all must be "
            "alike"
        )
    return [
        read_json(key, text, partial(_checked, rank, info))
        for rank, (key, text) in enumerate(texts.items())
    ]


def as_text(info: RankInfo) -> str:
    """Return an info as text, for the store and for proofs to local peers."""
    return json.dumps(asdict(info))


_TEXTS = ("host_id", "host", "socket", "secret", "version", "process")
_MOST_CORES, _MOST_TEXT, _MOST_SOCKET = 1 << 16, 1000, 100


def _checked(rank: int, mine: RankInfo, fields: Any) -> RankInfo:
    """Return the info of `rank` from its JSON; ValueError or TypeError if malformed."""
    info = RankInfo(**fields)
    whole(info.rank, rank, rank)
    whole(info.pid, 1, 1 << 30)
    for bytes_ in (info.read_from, info.write_from):
        whole(bytes_, 0, 1 << 62)
    texts = [getattr(info, name) for name in _TEXTS]
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise ValueError("not texts")
    if sum(len(text.encode()) for text in texts) > _MOST_TEXT or len(info.socket) > _MOST_SOCKET:
        raise ValueError("too long")
    if not info.cores or {whole(core, 0, _MOST_CORES) for core in info.cores} != {*info.cores}:
        raise ValueError("no cores")
    if type(info.quota) is not float or not info.quota >= 1.0:
        raise ValueError("no quota")
    if rank == mine.rank and info != mine:
        raise ValueError("not what this rank has published")
    return info


def _not_ready(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} came, and did not get ready: still compiling, stopped or dead"


def socket_timeout(deadline: Deadline) -> float:
    """Return the seconds left, as a timeout for a socket."""
    # Zero would make a socket non-blocking, and a socket takes no infinite timeout.
    return min(max(deadline.remaining(), 0.001), 10.0 * 365 * 86400)
