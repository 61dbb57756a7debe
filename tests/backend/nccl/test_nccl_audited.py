"""What a GPU shows first holds over the emulators at their strictest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import audited_ranks as audited
import pytest
from device_ranks import afresh
from emulated import emulated_ranks, needs_emulators

from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators
Law = Callable[[ProcessGroup], None]
STRICT = {"NC10D_EMULATED_LAX": ""}
NOT_YET = {
    "an_abort_ends_two_stuck_communicators": "communicators are aborted one after another",
    "an_abort_with_a_live_graph_ends": "an abort waits for NCCL, and NCCL for the graph",
    "memory_of_temporaries_is_bounded": "ended Works keep their arrays until they are swept",
    "durations_need_no_torch": "cuEventElapsedTime needs a current context",
    "8 tags, received first, 8": "each tag has a communicator and a stream",
    "16 tags, received first, 8": "each tag has a communicator and a stream",
    "40 tags, received first, 8": "each tag has a communicator and a stream",
    "40 tags, received first, 32": "each tag has a communicator and a stream",
}
"""Laws that do not hold yet, and why."""


def each(laws: dict[str, Law], suffix: str = "") -> pytest.MarkDecorator:
    """Run a test for each law, by name."""
    found = []
    for name, law in laws.items():
        reason = NOT_YET.get(name + suffix)
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        found.append(pytest.param(law, id=name, marks=marks))
    return pytest.mark.parametrize("law", found)


def named(*laws: Law) -> dict[str, Law]:
    return {law.__name__: law for law in laws}


@pytest.mark.parametrize("nonblocking", ["0", "1"], ids=["blocking", "nonblocking"])
@each(named(*audited.ABORTS))
def test_aborts_end_in_bounded_time(law: Law, nonblocking: str) -> None:
    with emulated_ranks(2, NC10D_NCCL_NONBLOCKING=nonblocking, **STRICT) as ranks:
        ranks.run(law)


@pytest.fixture(scope="module", params=["0", "1"], ids=["blocking", "nonblocking"])
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with emulated_ranks(2, NC10D_NCCL_NONBLOCKING=request.param, **STRICT) as ranks:
        yield ranks


@each(named(*audited.MEMORY, *audited.ENDS, *audited.TIMES))
def test_laws_hold_with_two_ranks(two: Ranks, law: Law) -> None:
    two.run(afresh, [law] * 2)


def receiving(queues: int) -> Iterator[Ranks]:
    with emulated_ranks(2, NC10D_EMULATED_QUEUES=str(queues), **STRICT) as ranks:
        yield ranks


@pytest.fixture
def few() -> Iterator[Ranks]:
    """Yield new ranks, in which streams share queues in the same way each time."""
    yield from receiving(8)


@pytest.fixture(scope="module")
def many() -> Iterator[Ranks]:
    yield from receiving(32)


@each(audited.messages(), ", 8")
def test_both_ranks_receive_first_with_8_queues(few: Ranks, law: Law) -> None:
    few.run(afresh, [law] * 2)


@each(audited.messages(), ", 32")
def test_both_ranks_receive_first_with_32_queues(many: Ranks, law: Law) -> None:
    many.run(afresh, [law] * 2)


@pytest.fixture(scope="module")
def lone() -> Iterator[Ranks]:
    with emulated_ranks(1, NC10D_EMULATED_GPUS="1", **STRICT) as ranks:
        yield ranks


@each(named(*audited.MEMORY, *audited.TIMES))
def test_laws_hold_with_one_rank(lone: Ranks, law: Law) -> None:
    lone.run(afresh, [law])
