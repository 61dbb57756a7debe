"""Reductions in rank order on devices, over the emulators: laws, bytes and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import device_ranks as on
import pytest
from emulated import emulated_ranks, needs_emulators
from folding_ranks import FOLDING

from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators


@pytest.fixture(scope="module", params=[(3, "0"), (4, "1")], ids=["3 blocking", "4 nonblocking"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    size, nonblocking = request.param
    given = {"NC10D_NCCL_NONBLOCKING": nonblocking, "NC10D_EMULATED_GUARD": "1"}
    with emulated_ranks(size, timeout=60.0, **given) as found:
        yield found


@pytest.mark.parametrize("law", FOLDING, ids=lambda law: law.__name__)
def test_laws_of_folds(ranks: Ranks, law: Callable[..., None]) -> None:
    ranks.run(on.afresh, [law] * ranks.world_size)
