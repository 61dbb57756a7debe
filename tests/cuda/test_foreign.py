"""nc10d reads Numba's device arrays as their `__cuda_array_interface__` describes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from emulated import emulated_ranks, needs_emulators

pytestmark = needs_emulators
SHAPES: list[tuple[int, ...]] = [(3,), (0,), (), (2, 3), (1, 4), (4, 1), (2, 0, 3)]


class Plain:
    """An array with the interface only."""

    def __init__(self, x: Any) -> None:
        self.x = x

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.x.__cuda_array_interface__  # type: ignore[no-any-return]


def numba_and_interface_agree(_group: Any) -> None:
    from numba import cuda as numba

    from nc10d.arrays.buffer import as_buffer, device_type, single_device_types
    from nc10d.cuda import driver

    driver.driver()
    for dtype in (np.float32, np.int8, np.complex128, np.bool_):
        for shape in SHAPES:
            whole = numba.to_device(np.ones(shape, dtype))
            views = [whole, numba.to_device(np.ones(shape, dtype, order="F"))]
            if shape and all(shape):
                views += [whole[1:], whole[::2]]
            if len(shape) > 1 and all(shape):
                views += [whole[:, :1], whole[:, 1:]]
            for x in views:
                found, expected = as_buffer(x), as_buffer(Plain(x))
                assert found.owner is x
                assert _fields(found) == _fields(expected), (dtype, shape)
                assert device_type(x) == "cuda"
    assert type(whole) in single_device_types


def _fields(buffer: Any) -> tuple[Any, ...]:
    fields = dataclasses.asdict(dataclasses.replace(buffer, owner=None))
    if not buffer.count:  # address and strides of an empty array do not matter
        fields.update(address=0, strides=())
    if buffer.contiguous:
        fields["strides"] = ()  # a dimension of length 1 may have any stride
    return tuple(fields.values())


def test_numba_and_the_interface_agree() -> None:
    with emulated_ranks(1, "fake", 90.0) as ranks:
        ranks.run(numba_and_interface_agree)
