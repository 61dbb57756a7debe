"""The layout of staging memory, decided without a device: the bytes to copy, and their places."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.backend.staged.staging import HostLayout, overlap_any, rows

Array = np.ndarray[Any, np.dtype[Any]]
ROOM = np.arange(4096, dtype=np.uint8)


@st.composite
def views(draw: st.DrawFn) -> Array:
    """Draw a view of ROOM: any dtype, slices with any step, any order of dimensions."""
    dtype = np.dtype(draw(st.sampled_from(["u1", "i2", "f4", "c16"])))
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    flat = ROOM[draw(st.integers(0, 64)) :]
    x = flat[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
    cuts = [st.slices(n) for n in shape]
    return x[(*map(draw, cuts), ...)].transpose(draw(st.permutations(range(len(shape)))))


def addresses(buffer: Buffer) -> set[int]:
    """Return the address of every byte of every element."""
    found = set()
    for place in np.ndindex(*buffer.shape):
        steps = zip(place, buffer.strides, strict=True)
        first = buffer.address + sum(n * step for n, step in steps)
        found |= set(range(first, first + buffer.dtype.itemsize))
    return found


@given(views())
def test_rows_are_the_elements_and_nothing_else(x: Array) -> None:
    buffer = as_buffer(x)
    covered = [
        piece.address + row * piece.pitch + byte
        for piece in rows(buffer)
        for row in range(piece.height)
        for byte in range(piece.width)
    ]
    assert len(covered) == len(set(covered))
    assert set(covered) == addresses(buffer)


def test_a_column_of_a_matrix_is_one_copy() -> None:
    matrix = np.zeros((50, 40), np.float32)
    (piece,) = rows(as_buffer(matrix[:, 3]))
    assert (piece.width, piece.height, piece.pitch) == (4, 50, 160)
    (block,) = rows(as_buffer(matrix[:, 3:7]))
    assert (block.width, block.height, block.pitch) == (16, 50, 160)


def test_elements_that_share_bytes_are_read_as_one_piece() -> None:
    window = np.lib.stride_tricks.sliding_window_view(np.arange(10), 3)
    (piece,) = rows(as_buffer(window))
    assert (piece.width, piece.height) == (80, 1)


@given(st.lists(views(), max_size=5))
def test_memory_is_shared_on_the_host_as_it_is_on_the_device(arrays: list[Array]) -> None:
    buffers = [as_buffer(x) for x in arrays]
    layout = HostLayout(buffers)
    owned = {address for buffer in buffers for address in addresses(buffer)}
    places = {address: layout.offset(address) for address in owned}
    assert len(set(places.values())) == len(places), "two bytes would lie in one place"
    assert all(0 <= place < layout.nbytes for place in places.values())
    for buffer in buffers:
        low, high = buffer.span
        if low < high:
            assert layout.offset(high - 1) - layout.offset(low) == high - 1 - low


@given(st.lists(views(), max_size=3), st.lists(views(), max_size=3))
def test_arrays_that_share_a_byte_overlap(first: list[Array], second: list[Array]) -> None:
    share = any(np.may_share_memory(x, y) for x in first for y in second if x.size and y.size)
    assert overlap_any([as_buffer(x) for x in first], [as_buffer(x) for x in second]) == share


# Copies to the host and back
