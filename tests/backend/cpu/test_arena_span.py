"""Machine and limits bound an arena's address space; an error names the limit."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from nc10d.backend.cpu.memory import arena
from nc10d.backend.cpu.memory.arena import LEAST_BYTES, MOST_BYTES, ODD_BYTES, span_of

UNLIMITED = resource.RLIM_INFINITY, resource.RLIM_INFINITY


def limited(monkeypatch: pytest.MonkeyPatch, kind: int, limit: int) -> None:
    real = {kind: (limit, limit)}
    monkeypatch.setattr(arena.resource, "getrlimit", lambda each: real.get(each, UNLIMITED))


def test_without_limits_the_machine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, -1, 0)
    span, bound = span_of(2)
    assert 1 << 30 <= span <= MOST_BYTES
    assert span % (1 << 30) == ODD_BYTES, "arenas behind each other have other lower bits"
    assert "memory of this machine" in bound


@pytest.mark.parametrize(
    ("kind", "name"), [("RLIMIT_AS", "ulimit -v"), ("RLIMIT_FSIZE", "ulimit -f")]
)
@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_a_limit_bounds_the_arenas_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, ranks: int
) -> None:
    # Ranks of other tests may have mapped some 2^40 bytes in this process.
    limit = 1 << 44 if kind == "RLIMIT_AS" else 1 << 30
    monkeypatch.setattr(arena, "MOST_BYTES", 1 << 50)
    monkeypatch.setattr(arena.os, "sysconf", lambda _: 1 << 40)
    limited(monkeypatch, getattr(resource, kind), limit)
    span, bound = span_of(ranks)
    assert span * (ranks if kind == "RLIMIT_AS" else 1) <= limit
    assert f"{limit} bytes ({name})" in bound


def test_too_low_a_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIMIT_FSIZE, LEAST_BYTES - 1)
    with pytest.raises(MemoryError, match=r"at least 8388608 bytes .* \(ulimit -f\)"):
        span_of(2)


SCRIPT = """
import resource, sys
import nc10d as dist
from nc10d.testing import run_ranks
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26,) * 2)
def grow(group):
    try:
        dist.zeros(1 << 30)
    except MemoryError as error:
        return str(error)
print(run_ranks(grow, 1)[0])
"""


def test_a_rank_under_a_limit_works_and_names_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert "no room for 8589934592 bytes" in done.stdout, done.stderr
    assert "67108864 bytes (ulimit -f)" in done.stdout
