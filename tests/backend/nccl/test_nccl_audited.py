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


def each(*laws: Law) -> pytest.MarkDecorator:
    """Run a test for each law, by name."""
    return pytest.mark.parametrize("law", laws, ids=lambda law: law.__name__)


def each_of(laws: dict[str, Law]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("law", laws.values(), ids=list(laws))


@pytest.mark.parametrize("nonblocking", ["0", "1"], ids=["blocking", "nonblocking"])
@each(*audited.ABORTS)
def test_aborts_end_in_bounded_time(law: Law, nonblocking: str) -> None:
    with emulated_ranks(2, NC10D_NCCL_NONBLOCKING=nonblocking) as ranks:
        ranks.run(law)


@pytest.fixture(scope="module", params=["0", "1"], ids=["blocking", "nonblocking"])
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with emulated_ranks(2, NC10D_NCCL_NONBLOCKING=request.param) as ranks:
        yield ranks


@each(*audited.MEMORY, *audited.ENDS, *audited.TIMES)
def test_laws_hold_with_two_ranks(two: Ranks, law: Law) -> None:
    two.run(afresh, [law] * 2)


def receiving(queues: int) -> Iterator[Ranks]:
    with emulated_ranks(2, CUDA_DEVICE_MAX_CONNECTIONS=str(queues)) as ranks:
        yield ranks


@pytest.fixture
def few() -> Iterator[Ranks]:
    """Yield new ranks, in which streams share queues in the same way each time."""
    yield from receiving(8)


@pytest.fixture(scope="module")
def many() -> Iterator[Ranks]:
    yield from receiving(32)


@each_of(audited.messages())
def test_both_ranks_receive_first_with_8_queues(few: Ranks, law: Law) -> None:
    few.run(afresh, [law] * 2)


@each_of(audited.messages())
def test_both_ranks_receive_first_with_32_queues(many: Ranks, law: Law) -> None:
    many.run(afresh, [law] * 2)


@pytest.fixture(scope="module")
def lone() -> Iterator[Ranks]:
    with emulated_ranks(1, NC10D_EMULATED_GPUS="1") as ranks:
        yield ranks


@each(*audited.MEMORY, *audited.TIMES)
def test_laws_hold_with_one_rank(lone: Ranks, law: Law) -> None:
    lone.run(afresh, [law])
