"""The debug level: set by the program, or read from the environment at the first call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

import nc10d as dist
from nc10d import DebugLevel


@pytest.fixture(autouse=True)
def level_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("NC10D_DEBUG", raising=False)
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    before = dist.get_debug_level()
    yield
    dist.set_debug_level(before)


def from_env() -> DebugLevel:
    dist.set_debug_level_from_env()
    return dist.get_debug_level()


def test_the_levels_are_torchs() -> None:
    theirs = pytest.importorskip("torch.distributed").DebugLevel
    for level in DebugLevel:
        assert int(getattr(theirs, level.name).value) == level


@pytest.mark.parametrize("level", DebugLevel)
@pytest.mark.parametrize("name", ["NC10D_DEBUG", "TORCH_DISTRIBUTED_DEBUG"])
def test_either_variable_sets_the_level(
    monkeypatch: pytest.MonkeyPatch, name: str, level: DebugLevel
) -> None:
    for text in (level.name, level.name.lower()):
        monkeypatch.setenv(name, text)
        assert from_env() is level


def test_nc10ds_variable_precedes_torchs_and_an_empty_variable_is_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("NC10D_DEBUG", "INFO")
    assert from_env() is DebugLevel.INFO
    monkeypatch.setenv("NC10D_DEBUG", "")
    assert from_env() is DebugLevel.DETAIL


def test_without_a_variable_the_debug_level_is_off() -> None:
    dist.set_debug_level(DebugLevel.DETAIL)
    assert from_env() is DebugLevel.OFF


def test_an_unknown_level_is_an_error_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.set_debug_level(DebugLevel.INFO)
    monkeypatch.setenv("NC10D_DEBUG", "LOUD")
    with pytest.raises(ValueError, match=r"NC10D_DEBUG must be one of OFF, INFO, DETAIL.*'LOUD'"):
        dist.set_debug_level_from_env()
    with pytest.raises(TypeError, match="DebugLevel"):
        dist.set_debug_level(2)  # type: ignore[arg-type]
    assert dist.get_debug_level() is DebugLevel.INFO


def test_the_environment_is_read_at_the_first_call() -> None:
    code = (
        "import os, nc10d; os.environ['NC10D_DEBUG'] = 'info'; print(nc10d.get_debug_level().name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "INFO"
