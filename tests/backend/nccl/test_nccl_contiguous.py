"""The pieces of a strided array are few, and together are the array in C order."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nc10d.arrays.buffer import as_buffer
from nc10d.backend.nccl.launch.contiguous import piece_count, pieces
from nc10d.testing.layouts import LAYOUTS, lay

Array = np.ndarray[Any, np.dtype[Any]]


@st.composite
def views(draw: st.DrawFn) -> Array:
    """Draw a slice of a transposed array, or an array with repeated elements."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    x = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    x = x.transpose(draw(st.permutations(range(x.ndim))))
    steps = [slice(draw(st.sampled_from([None, 1])), None, draw(_steps)) for _ in shape]
    x = x[tuple(steps)] if steps else x
    return np.broadcast_to(x, (2, *x.shape)) if draw(st.booleans()) else x


_steps = st.sampled_from([1, 1, 2, -1])


def copied(x: Array) -> bytes:
    """Copy an array's pieces as the driver does."""
    buffer = as_buffer(x)
    made = bytearray(buffer.nbytes)
    for piece in pieces(buffer):
        for row in range(piece.height):
            at, to = piece.at + row * piece.pitch, piece.to + row * piece.to_pitch
            made[to : to + piece.width] = ctypes.string_at(buffer.address + at, piece.width)
    return bytes(made)


@given(views())
def test_pieces_are_the_array_in_c_order(x: Array) -> None:
    assert copied(x) == x.tobytes()
    assert len(list(pieces(as_buffer(x)))) == piece_count(as_buffer(x))


def test_bytes_that_a_single_copy_can_move_are_a_single_piece() -> None:
    x = np.zeros((6, 4, 10), np.float32)
    whole = {"C": x, "rows": x[:, :, :7], "slices": x[::2], "column": x[:, 1, 3]}
    assert {name: piece_count(as_buffer(view)) for name, view in whole.items()} == dict.fromkeys(
        whole, 1
    )
    assert piece_count(as_buffer(x.transpose(2, 0, 1))) == 10
    assert [piece_count(as_buffer(lay(x[0], layout))) for layout in LAYOUTS] == [1, 1, 1, 40, 4]
