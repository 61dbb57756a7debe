"""Copies by vectors copy every byte and no other, wherever arrays lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.kernels import copy as copying

from .calling import GUARD, KERNEL, Memory

copy = KERNEL(copying.vector_copy_address())


@given(
    nbytes=st.one_of(st.integers(0, 700), st.integers(0, 20_000)),
    start=st.integers(0, GUARD - 1),
    end=st.integers(0, GUARD - 1),
)
def test_a_copy_has_all_bytes_and_leaves_those_beside_it(nbytes, start, end):
    x = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    src, dst = Memory(x, start), Memory(np.zeros_like(x), end)
    copy(dst.address, src.address, 0, nbytes)
    assert np.array_equal(dst.array(), x)
    assert dst.guards_hold()
    assert np.array_equal(src.array(), x)


def test_an_array_may_be_copied_onto_itself():
    x = np.arange(5_000, dtype=np.uint16)
    memory = Memory(x, 16)
    copy(memory.address, memory.address, 0, memory.nbytes)
    assert np.array_equal(memory.array(), x)


@pytest.mark.parametrize(
    ("cpu", "libc", "slow"),
    [
        ("znver3", "glibc 2.36", True),
        ("znver4", "glibc 2.9", True),
        ("znver3", "glibc 2.39", True),
        ("znver3", "glibc 2.40", False),
        ("znver3", "glibc 2.41.1", False),
        ("znver2", "glibc 2.36", False),
        ("znver5", "glibc 2.36", False),
        ("sapphirerapids", "glibc 2.36", False),
        ("znver3", "", False),
    ],
)
def test_which_c_libraries_copy_slowly_on_which_cpus(cpu, libc, slow):
    assert copying.copies_slowly(cpu, libc) == slow


def test_a_copy_is_done_by_the_fastest_function_for_its_size(monkeypatch):
    monkeypatch.setattr(copying, "needed", lambda: True)
    much, some, few = copying.STREAM_BYTES, copying.QUICK, copying.QUICK - 1
    vector, past = copying.vector_copy_address(), copying.stream_copy_address()
    assert [copying.copier(n, n) for n in (few, some, much)] == [0, vector, past]
    assert copying.copier(some, much) == past
    monkeypatch.setattr(copying, "needed", lambda: False)
    assert [copying.copier(n, n) for n in (few, some, much)] == [0, 0, past]
