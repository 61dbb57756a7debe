"""The modes in which the same call can be made; all must leave the same bits.

Every rank runs `perform(group, make, mode)`. It makes the call that `make()` describes, on new
arrays each time, in the named mode, and returns the operations. AssertionError if a call returned
a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nc10d.api.queries import coalescing_manager
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Op
from nc10d.testing.requirements import neighbours
from nc10d.testing.strategies import issue
from nc10d.work import Work

Make = Callable[[], Op]
Mode = Callable[[ProcessGroup, Make], list[Op]]


def perform(group: ProcessGroup, make: Make, mode: str) -> list[Op]:
    """Make the call in a mode of MODES, or "once"; return the operations."""
    return _once(group, make) if mode == "once" else MODES[mode](group, make)


def _once(group: ProcessGroup, make: Make) -> list[Op]:
    op = make()
    assert issue(group, op) is None, "a sync call must return None"
    return [op]


def _sync(group: ProcessGroup, make: Make) -> list[Op]:
    """Make the call twice: a backend may handle a repeated call differently."""
    return [*_once(group, make), *_once(group, make)]


def _async(group: ProcessGroup, make: Make) -> list[Op]:
    ops = [make(), make()]
    works = [issue(group, op, True) for op in ops]
    for work in reversed(works):
        _ended(work)
    return ops


def _ended(work: object) -> None:
    assert isinstance(work, Work), f"an async call must return a Work, got {work!r}"
    assert work.wait() is True, "wait() must return True"
    assert work.is_completed(), f"{work!r} has been waited for"
    assert work.is_success(), f"{work!r} raised nothing"
    assert work.exception() is None, f"{work!r} raised nothing"


def _coalesced(group: ProcessGroup, make: Make) -> list[Op]:
    ops = [make(), make()]
    with coalescing_manager(group):
        assert issue(group, ops[0]) is None
        work = issue(group, ops[1], True)
    _ended(work)
    return ops


def _coalesced_async(group: ProcessGroup, make: Make) -> list[Op]:
    ops, extra = [make(), make()], np.full(9, 1.0)
    with coalescing_manager(group, async_ops=True) as block:
        issue(group, ops[0])
        group.all_reduce(extra)
        issue(group, ops[1])
    block.wait()
    assert (extra == group.size).all(), "another call in the same block went wrong"
    return ops


def _beside_messages(group: ProcessGroup, make: Make) -> list[Op]:
    """Make the call while a message between ranks is in flight."""
    if group.size == 1:
        return _once(group, make)
    following, previous = neighbours(group)
    got = np.zeros(4, np.int64)
    coming = group.irecv(got, previous, tag=1)
    ops = _once(group, make)
    group.send(np.full(4, group.rank), following, tag=1)
    _ended(coming)
    assert (got == previous).all(), "a message beside the call went wrong"
    return ops


def _among_messages(group: ProcessGroup, make: Make) -> list[Op]:
    """Make the call and messages both ways as a single submission."""
    ops = [make(), make()]
    following, previous = neighbours(group)
    got = np.zeros(4, np.int64)
    with coalescing_manager(group):
        issue(group, ops[0])
        if group.size > 1:
            group.isend(np.full(4, group.rank), following)
            group.irecv(got, previous)
        issue(group, ops[1])
    assert group.size == 1 or (got == previous).all(), "a message in the block went wrong"
    return ops


MODES: dict[str, Mode] = {
    "sync": _sync,
    "async": _async,
    "coalesced": _coalesced,
    "coalesced async": _coalesced_async,
    "beside messages": _beside_messages,
    "among messages": _among_messages,
}
