"""The sizes at which collectives of a host change how bytes travel.

Messages have theirs in transport/links.py, groups across hosts in hosts_reduce.py.

Arrays that nc10d allocated (registered arrays) lie in shared memory: from DIRECT bytes on, peers
of the host access them in place on every CPU. Plain arrays are reached through the kernel
(process_vm_readv, process_vm_writev). Whether that is faster than the staging buffers depends on
the CPU, so each rank publishes two thresholds and the ranks of a host agree on the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass

NEVER = 1 << 62
"""A threshold that no array reaches."""


DIRECT = 64 * 1024
"""Bytes from which peers read a registered array in place."""


PAGE = 4096
"""Bytes of a page. A rank exposes whole pages for writing, so that it can withdraw them."""


BROADCAST_SHARE = 16
"""A two-rank broadcast writes from this fraction of `write_from` on: it computes no result."""


WINDOW = 2 << 20
"""Bytes of an array that are reduced and fetched at a time.

A chunk of this size has left its owner's private cache when peers fetch it.
"""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From how many bytes on the kernel moves plain arrays between two ranks of a host.

    The kernel is slow at cache lines that another core has just written, so the staging buffers
    win for arrays that fit in a cache. From `read_from` bytes on, reading alone beats staging. Two
    ranks that also write into each other's arrays beat it earlier, from `write_from` bytes on.
    """

    read_from: int = 4 << 20
    write_from: int = 1 << 20


DEFAULTS = Thresholds()
"""The thresholds of CPUs that cpu_policy.py does not list, and of groups across hosts."""


def one_shot_bytes(ranks: int, *, oversubscribed: bool) -> int:
    """Return the largest array in bytes that every rank reduces completely by itself.

    For two ranks this is no more work than sharing the reduction. More ranks repeat the whole
    work on each rank, which pays where a barrier is slow: up to larger sizes if the ranks share
    cores (measured), else up to 4 KiB of all ranks together (by the cost model).
    """
    if ranks <= 2:
        return 64 * 1024
    return 16 * 1024 if oversubscribed else 4 * 1024 // ranks
