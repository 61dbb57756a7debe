"""`check_process_group`: a group's calls, for writers of another ProcessGroup.

    check_process_group(lambda group: MyGroup(group))

The object has nc10d.ProcessGroup's methods, with ranks in the group. The results are compared bit
for bit with the reference, sync and async, in a cover of all pairs of call, dtype, reduction, size
and shape; and messages and barriers meet their requirements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from nc10d.arrays.dtypes import DType
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import conformance, requirements
from nc10d.testing.cases import CollectiveCase, cover
from nc10d.testing.checks.collected import check_all
from nc10d.testing.ranks import Kind, Ranks

Make = Callable[[ProcessGroup], Any]
MODES = ("sync", "async")
REQUIREMENTS = (
    requirements.tags_are_matched_in_any_order,
    requirements.one_tag_keeps_the_order,
    requirements.any_source_takes_each_message_once,
    requirements.a_sent_array_may_be_changed,
    requirements.nobody_leaves_a_barrier_early,
)


def check_process_group(
    make: Make,
    world_sizes: Sequence[int] = (1, 2, 3),
    dtypes: Sequence[DType] = (DType.FLOAT32, DType.INT64, DType.BFLOAT16),
    *,
    kind: Kind = "threads",
    timeout: float = 20.0,
) -> int:
    """Check a kind of group; return the number of checks. AssertionError names the failed ones.

    `make(group)` returns the object under test for a rank; with kind="processes" it must pickle.
    `timeout`, in seconds, is the groups'.
    """
    count = 0
    for size in world_sizes:
        with Ranks(size, kind, timeout=timeout) as ranks:
            laws = {
                str(case): functools.partial(_check, make, ranks, case)
                for case in _cases(size, dtypes)
            }
            for requirement in REQUIREMENTS:
                title = f"{requirement.__name__.replace('_', ' ')}, {size} ranks"
                laws[title] = functools.partial(_require, make, ranks, requirement)
            count += check_all(laws)
    return count


def _cases(size: int, dtypes: Sequence[DType]) -> list[CollectiveCase]:
    cases = cover([size], dtypes)
    return [
        CollectiveCase(c.call, c.dtype, c.op, c.size, c.shape, MODES[number % 2], c.seed)
        for number, c in enumerate(cases)
    ]


def _check(make: Make, ranks: Ranks, case: CollectiveCase) -> None:
    found = conformance.complaints(ranks, case, make)
    if found:
        raise AssertionError("; ".join(found[:3]))


def _require(make: Make, ranks: Ranks, requirement: Callable[[Any], None]) -> None:
    ranks.run(_on_made, [make] * ranks.world_size, [requirement] * ranks.world_size)


def _on_made(group: ProcessGroup, make: Make, requirement: Callable[[Any], None]) -> None:
    requirement(make(group))
