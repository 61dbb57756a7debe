"""Groups whose ranks are told that they are on several hosts: everything that any group does."""

from __future__ import annotations

import functools

import pytest

from nc10d.backend.base import BackendSetup
from nc10d.backend.cpu.backend import CpuBackend, make
from nc10d.dtypes import DType
from nc10d.testing import check_backend

EXACT = (DType.INT32, DType.UINT8, DType.BOOL)


def on_hosts(names: str, setup: BackendSetup) -> CpuBackend:
    """Make the backend of a rank whose host is a letter of `names`."""
    return make(setup, names[setup.rank % len(names)])


def test_ranks_on_hosts_of_their_own_do_what_any_backend_must() -> None:
    assert check_backend(functools.partial(on_hosts, "abcde"), (2, 3), seed=5) > 200


@pytest.mark.parametrize("names", ["aab", "aabb", "abab", "aaab"])
def test_hosts_with_several_ranks_do_too(names: str) -> None:
    make_on = functools.partial(on_hosts, names)
    assert check_backend(make_on, (len(names),), dtypes=EXACT, seed=6) > 60
