"""The memory of an operation on a polled library."""

from __future__ import annotations

import weakref

import numpy as np

from nc10d.arrays.dtypes import DType
from nc10d.backend.polled.flat_buffers import OpBuffers


def test_copies_live_as_long_as_the_operation() -> None:
    buffers, x = OpBuffers(), np.arange(6.0).reshape(2, 3)
    owners = [
        weakref.ref(flat.owner)
        for flat in (
            buffers.contiguous(x.T, False),
            buffers.chunks([x, x], 2, False)[0],
            buffers.scratch(3, DType.FLOAT32),
        )
    ]
    assert all(owner() is not None for owner in owners)
    del buffers
    assert all(owner() is None for owner in owners)
