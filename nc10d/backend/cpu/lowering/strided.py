"""Strided arrays: a program works on a contiguous copy, made and written back by its own steps.

Records whose fields lie in arrays of their own are copied in the same way, field by field.

The copies are steps in the program, and so keep the program's order: in a batch, an operation on a
slice sees the results of earlier operations on the array, and later operations see its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nc10d.arrays.buffer import Buffer
from nc10d.arrays.fields import Fields
from nc10d.backend.cpu.lowering.lower import LoweredOp, StridedArray
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.program.program import Program, Step
from nc10d.backend.cpu.program.steps import pack, unpack

Words = npt.NDArray[np.int64]


def make_contiguous(lowered: LoweredOp) -> LoweredOp:
    """Return a lowered operation whose program works on contiguous arrays only."""
    lowered = _join_fields(lowered)
    found = [i for i, x in enumerate(lowered.arrays) if isinstance(x, Buffer) and not x.contiguous]
    if not found:
        return lowered
    arrays = list(lowered.arrays)
    strided = []
    for number in found:
        buffer = arrays[number]
        assert isinstance(buffer, Buffer)
        # The copy takes the array's number, so that the program itself stays unchanged.
        arrays[number] = np.empty(buffer.nbytes, np.uint8)
        strided.append(StridedArray(number, len(arrays), len(arrays) + 1, number in lowered.outs))
        arrays += [buffer, shape_words(buffer)]

    def build() -> Program:
        inner = lowered.build()
        steps = (*packs(strided), *inner.steps, *unpacks(strided))
        return Program(inner.call, steps, len(arrays))

    key = lowered.key, *found
    return replace(lowered, key=key, arrays=arrays, build=build, strided=tuple(strided))


def _join_fields(lowered: LoweredOp) -> LoweredOp:
    """Return a lowered operation that copies fields to contiguous records, and back."""
    # As for strided arrays, the other way round: a field's array is contiguous, its place among the
    # records is not.
    arrays, outs = list(lowered.arrays), list(lowered.outs)
    before: list[Step] = []
    behind: list[Step] = []
    found = [(i, x) for i, x in enumerate(arrays) if isinstance(x, Buffer)]
    for number, x in found:
        if not isinstance(x.owner, Fields):
            continue
        records = np.empty(x.nbytes, np.uint8)
        arrays[number] = records
        for field, part in zip(x.owner.element.fields, x.owner.buffers, strict=True):
            nbytes = field.count * field.dtype.itemsize
            place = len(arrays), len(arrays) + 1, len(arrays) + 2
            shape = np.array([nbytes, 1, x.count, x.dtype.itemsize, 0], np.int64)
            arrays += [part, records[field.offset :], shape]
            before.append(unpack(place[1], place[0], place[2]))
            if number in lowered.outs:
                outs.append(place[0])
                behind.append(pack(place[0], place[1], place[2]))
    if not before:
        return lowered

    def build() -> Program:
        inner = lowered.build()
        return Program(inner.call, (*before, *inner.steps, *behind), len(arrays))

    key = lowered.key, "fields", len(arrays)
    return replace(lowered, key=key, arrays=arrays, outs=tuple(outs), build=build, part=None)


def packs(arrays: Sequence[StridedArray], base: int = 0) -> list[Step]:
    """Return the steps that make the copies; the operation's arrays are numbered from `base`."""
    return [pack(base + a.copy, base + a.strided, base + a.shape) for a in arrays]


def unpacks(arrays: Sequence[StridedArray], base: int = 0) -> list[Step]:
    """Return the steps that write back the copies that the program changes."""
    return [unpack(base + a.strided, base + a.copy, base + a.shape) for a in arrays if a.written]


def shape_words(buffer: Buffer) -> Words:
    """Return item bytes, dimensions, sizes, byte strides for the step `pack`, and room for it."""
    # Dimensions that lie one behind the other in memory are merged: fewer loops, longer items.
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
    """Addresses of a program's arrays, in its order, and the objects that keep them valid."""

    addresses: list[int]
    keep: list[object]


def operands(lowered: LoweredOp) -> Operands:
    """Return the memory for a lowered operation that `make_contiguous` has returned."""
    arrays = lowered.arrays
    addresses = [x.address if isinstance(x, Buffer) else plain.address(x) for x in arrays]
    return Operands(addresses, [x.owner if isinstance(x, Buffer) else x for x in arrays])


def message_operands(buffer: Buffer) -> Operands:
    """Return the memory for a message; a strided array comes with a copy and its shape."""
    if buffer.contiguous:
        return Operands([buffer.address], [buffer.owner])
    copy, shape = np.empty(buffer.nbytes, np.uint8), shape_words(buffer)
    addresses = [plain.address(copy), buffer.address, plain.address(shape)]
    return Operands(addresses, [copy, buffer.owner, shape])
