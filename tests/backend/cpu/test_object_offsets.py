"""Compiled code reads arrays and lists where this NumPy and this CPython keep them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.backend.cpu.native import cpython
from nc10d.errors import UnsupportedPlatform
from nc10d.testing import layouts, strategies

FOUND = (cpython.DATA_OFFSET, cpython.DIMS_OFFSET, cpython.DTYPE_OFFSET, cpython.FLAGS_OFFSET)


@given(strategies.dtypes(), st.sampled_from([(3,), (2, 5), (4, 3, 2), ()]), st.booleans())
def test_every_array_keeps_its_fields_in_the_same_places(
    dtype: Any, shape: tuple[int, ...], writeable: bool
) -> None:
    x = layouts.lay(np.ones(shape, dtype.numpy), "transposed" if len(shape) > 1 else "strided")
    x.flags.writeable = writeable
    assert cpython.array_offsets(x) == FOUND


@given(st.lists(st.integers() | st.text(), min_size=1))
def test_every_list_and_tuple_keeps_its_items_in_the_same_place(items: list[object]) -> None:
    assert cpython.list_is_known(items)
    assert cpython.list_is_known(tuple(items))


def test_an_object_of_another_layout_is_not_read() -> None:
    class Other:
        ctypes, dtype, flags = np.ones(3).ctypes, np.dtype(float), np.ones(3).flags
        shape, ndim = (3,), 1

    other: Any = Other()
    assert cpython.array_offsets(other) is None
    assert not cpython.list_is_known(range(3))

    class Wrong(np.ndarray):  # type: ignore[type-arg]
        ndim = 7

    assert cpython.array_offsets(np.ones((2, 3)).view(Wrong)) is None


@pytest.mark.parametrize(("name", "answer"), [("list_is_known", False), ("array_offsets", None)])
def test_an_unknown_layout_is_an_unsupported_platform(
    monkeypatch: pytest.MonkeyPatch, name: str, answer: object
) -> None:
    monkeypatch.setattr(cpython, name, lambda probe: answer)
    with pytest.raises(UnsupportedPlatform, match=r"CPython 3\..* with NumPy .* laid out"):
        cpython._find()
