"""Each thread that raises a failure raises a copy of it."""

from __future__ import annotations

import pytest

from nc10d.base.promise import copy_to_raise
from nc10d.errors import Aborted, CollectiveTimeout, DistError, PeerLost, StoreTimeout


@pytest.mark.parametrize("kind", [Aborted, PeerLost, CollectiveTimeout, StoreTimeout])
def test_a_copy_of_a_failure_is_a_failure_of_its_own(kind: type[DistError]) -> None:
    error = kind("rank 3 is gone", rank=3, op="all_reduce")
    copies = [copy_to_raise(error), copy_to_raise(error)]
    for copy in copies:
        assert isinstance(copy, kind)
        assert (copy.rank, copy.op, str(copy)) == (3, "all_reduce", "rank 3 is gone")
        assert copy.__cause__ is error
    copies[0].add_note("seen by one")
    assert copies[0] is not copies[1]
    assert not hasattr(copies[1], "__notes__")
