"""Choose the rank that owns each parameter's optimizer state.

Contract: pure functions of sizes alone, so ranks agree without messages. The rules are those of
torch.distributed.optim.ZeroRedundancyOptimizer: the next largest parameter goes to the rank with
the least so far, and a parameter is never divided.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import NamedTuple


def partition(sizes: Sequence[int], ranks: int, loads: list[int] | None = None) -> list[int]:
    """Return the owner of each parameter; `sizes` are element counts, in any unit.

    `loads` has what each rank owns already, and is updated: so a second group of parameters leaves
    the owners of the first unchanged. Ties go to the lower rank, and to the earlier parameter.
    """
    loads = [0] * ranks if loads is None else loads
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, rank = heap[0]
        owners[index] = rank
        loads[rank] = load + sizes[index]
        heapq.heapreplace(heap, (loads[rank], rank))
    return owners


class BucketPiece(NamedTuple):
    """Parameters `first` to `end` of a bucket, whose state `owner` has."""

    bucket: int
    first: int
    end: int
    owner: int


def bucket_pieces(
    buckets: Sequence[Sequence[int]], ranks: int, divide: bool = False
) -> list[list[BucketPiece]]:
    """Return the pieces of each bucket, for buckets given by the sizes of their parameters.

    Bucket b belongs to rank b modulo `ranks`. With `divide`, a bucket that is larger than a rank's
    even share of the total is divided between parameters, and pieces go to the rank with the least
    so far, small buckets first.
    """
    if not divide:
        return [[BucketPiece(b, 0, len(sizes), b % ranks)] for b, sizes in enumerate(buckets)]
    most = sum(map(sum, buckets)) / ranks
    loads = [0] * ranks
    pieces: list[list[BucketPiece]] = [[] for _ in buckets]
    for bucket in sorted(range(len(buckets)), key=lambda b: sum(buckets[b])):
        sizes = buckets[bucket]
        taken: set[int] = set()
        for first, end in _runs(sizes, most):
            owner = _least(loads, taken)
            taken.add(owner)
            loads[owner] += sum(sizes[first:end])
            pieces[bucket].append(BucketPiece(bucket, first, end, owner))
    return pieces


def _runs(sizes: Sequence[int], most: float) -> list[tuple[int, int]]:
    """Return the longest runs whose sums stay below `most`, or that hold a single parameter."""
    starts, total = [0], 0
    for index, size in enumerate(sizes):
        if total + size >= most and index > starts[-1]:
            starts.append(index)
            total = 0
        total += size
    return list(zip(starts, [*starts[1:], len(sizes)], strict=True))


def _least(loads: Sequence[int], taken: Collection[int]) -> int:
    """Return the rank with the least load outside of `taken`, or of all if all are taken."""
    free = [rank for rank in range(len(loads)) if rank not in taken]
    return min(free or range(len(loads)), key=loads.__getitem__)
