"""A Reducer of device arrays obeys the same laws when staged through host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from emulated import emulated_ranks, needs_emulators
from reducing_ranks import ANYWHERE

from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Start two ranks on one device, whose memory the CPU can't access."""
    given = {"NC10D_EMULATED_GUARD": "1", "NC10D_EMULATED_GPUS": "1"}
    with emulated_ranks(2, "cpu:cpu,cuda:staged", **given) as ranks:
        yield ranks


@pytest.mark.parametrize("law", ANYWHERE, ids=lambda law: law.__name__)
def test_reducer_laws_hold_through_host_memory(
    two: Ranks, law: Callable[[ProcessGroup], None]
) -> None:
    two.run(law)
