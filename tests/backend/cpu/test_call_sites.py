"""Errors name lines on every version of Python; where frames can't be read, a line says so."""

from __future__ import annotations

import numpy as np
import pytest

import nc10d as dist
from nc10d.backend.cpu.engine import call_sites
from nc10d.errors import CollectiveMismatch
from nc10d.testing import run_ranks


def differ(group: dist.ProcessGroup) -> str:
    def barrier(_: object) -> int:
        group.barrier()
        return 0

    calls = [barrier, lambda _: group.all_reduce(np.ones(1))]
    with pytest.raises(CollectiveMismatch) as caught:
        sorted([0], key=calls[group.rank])  # C code calls the function
    return str(caught.value)


def test_a_call_by_a_function_that_c_code_calls_has_its_line() -> None:
    text, _ = run_ranks(differ, 2)
    first = differ.__code__.co_firstlineno
    for line in (first + 2, first + 5):
        assert f"test_call_sites.py:{line}" in text


def test_an_unknown_layout_of_frames_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_sites, "first_instruction", lambda: None)
    assert call_sites.CallSites().address == 0
    assert "errors will not name the lines of calls: CPython 3." in caplog.text
