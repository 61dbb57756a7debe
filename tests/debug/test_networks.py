"""The lost network in the table of faults: both ranks name the other, or the row has a reason."""

from __future__ import annotations

import pytest

from benchmarks.faults import networks
from benchmarks.libraries.nc10d import Nc10d
from nc10d.testing.hosts.namespaces import why_not

REASON = why_not()


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_both_sides_of_a_cut_link_name_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_PEER_TIMEOUT", "3")
    library = Nc10d()
    library.warm()
    cell = networks.cut_off(library, 1)
    assert cell.words == "2 of 2 name the lost rank"
    assert min(cell.late) > 0


def test_a_row_without_namespaces_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    words = networks.cut_off(Nc10d(), 1).words
    assert words == "not played: network namespaces need ip (iproute2)"
