"""Strided arrays: a program works on a contiguous copy, made and written back by its own steps.

So the copies are part of the program's order: in a batch, an operation on a slice sees what the
operations before it have done to the array, and those behind it see its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.arrays.buffer import Buffer
from nc10d.backend.cpu.lowering.lower import LoweredOp, StridedArray
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.program.program import Program, Step
from nc10d.backend.cpu.program.steps import pack, unpack

Words = npt.NDArray[np.int64]


def straighten(request: LoweredOp) -> LoweredOp:
    """Return a request whose program sees contiguous arrays only."""
    found = [i for i, x in enumerate(request.arrays) if isinstance(x, Buffer) and not x.contiguous]
    if not found:
        return request
    arrays = list(request.arrays)
    folds = []
    for number in found:
        buffer = arrays[number]
        assert isinstance(buffer, Buffer)
        arrays[number] = np.empty(buffer.nbytes, np.uint8)
        folds.append(StridedArray(number, len(arrays), len(arrays) + 1, number in request.outs))
        arrays += [buffer, shape_words(buffer)]

    def build() -> Program:
        inner = request.build()
        steps = (*packs(folds), *inner.steps, *unpacks(folds))
        return Program(inner.call, steps, len(arrays))

    return replace(
        request,
        key=(request.key, *found),
        arrays=arrays,
        build=build,
        folds=tuple(folds),
    )


def packs(folds: Sequence[StridedArray], base: int = 0) -> list[Step]:
    """Return the steps that make the copies; the request's arrays are numbered from `base`."""
    return [pack(base + f.flat, base + f.strided, base + f.shape) for f in folds]


def unpacks(folds: Sequence[StridedArray], base: int = 0) -> list[Step]:
    """Return the steps that write back what the program has changed."""
    return [unpack(base + f.strided, base + f.flat, base + f.shape) for f in folds if f.written]


def shape_words(buffer: Buffer) -> Words:
    """Return how a strided array lies, as the step `pack` wants it, in as few lines as can be."""
    item = buffer.dtype.itemsize
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(buffer.shape, buffer.strides, strict=True):
        if size == 1:
            continue
        if strides and strides[-1] == size * stride:
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 1 and strides[-1] == item:
        item *= sizes.pop()
        strides.pop()
    return np.array([item, len(sizes), *sizes, *strides, *([0] * len(sizes))], np.int64)


@dataclass(slots=True)
class Operands:
    """Addresses in the program's order, and what keeps them valid."""

    addresses: list[int] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)


def resolve(request: LoweredOp) -> Operands:
    """Return the memory of a request that has been straightened."""
    resolved = Operands()
    for array in request.arrays:
        if isinstance(array, Buffer):
            resolved.addresses.append(array.address)
            resolved.keep.append(array.owner)
        else:
            resolved.addresses.append(plain.address(array))
            resolved.keep.append(array)
    return resolved


def resolve_message(buffer: Buffer) -> Operands:
    """Return the memory of a message; a strided array comes with a copy and its shape."""
    if buffer.contiguous:
        return Operands([buffer.address], [buffer.owner])
    copy, shape = np.empty(buffer.nbytes, np.uint8), shape_words(buffer)
    addresses = [plain.address(copy), buffer.address, plain.address(shape)]
    return Operands(addresses, [copy, buffer.owner, shape])
