"""How a function of one's own sees elements: as scalars, as tuples, or in memory.

| element | the function gets | and returns |
|---|---|---|
| a number | Numba's scalar; float32 for the narrow floats | a number, rounded to the type once |
| a record with scalars only | a named tuple | an argument, or a tuple with all fields |
| a record with arrays in it | Numba's record, in memory | an argument |

A function with a further parameter writes to that record in memory, at first a copy of the first
argument. Records in memory have wider types in place of narrow floats, and of truth values in
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_cast
from numba.np.numpy_support import from_dtype

from nc10d.arrays.dtypes import DType, ElementKind, ElementType, RecordType, alignment, widened
from nc10d.kernels import simd
from nc10d.kernels.simd import I8, I32, I64, Builder, Value, pointer_to

_WIDEST_ALIGN = 16
_AT_ONCE = 8
BYTES = I8.as_pointer()
_KINDS = types.Boolean, types.Integer, types.Float, types.Complex
_WIDEST = {"BOOL": 1, "UINT": 2, "INT": 2, "FLOAT": 3, "COMPLEX": 4}
"""How many kinds from the list a family takes as results: no float for an int."""


def _alignment(dtype: DType, offset: int, itemsize: int, aligned: bool) -> int:
    """Return how a number at `offset` in each element is aligned, in arrays that are `aligned`."""
    part = dtype.itemsize // (2 if dtype.family is ElementKind.COMPLEX else 1)
    places = offset | itemsize | part
    return places & -places if aligned else 1


Access = Callable[[Value], Value]
"""Marks an access to memory in the loop."""


def unmarked(instruction: Value) -> Value:
    """Return an access as it is, outside of loops with marks."""
    return instruction


@dataclass(frozen=True, slots=True)
class _Number:
    dtype: DType
    align: int

    @property
    def argument(self) -> types.Type:
        return types.float32 if self.dtype in simd.WIDEN else from_dtype(self.dtype.numpy)

    @property
    def result(self) -> str:
        return f"a number for {self.dtype.label}"

    def takes(self, kind: types.Type) -> bool:
        return isinstance(kind, _KINDS[: _WIDEST[self.dtype.family.name]])

    def load(self, context: Any, b: Builder, at: Value, access: Access) -> Value:
        stored = simd.STORED[self.dtype]
        parts = [
            access(b.load(pointer_to(b, place, stored), align=self.align))
            for place in self._places(b, at)
        ]
        if len(parts) == 2:
            whole = cgutils.create_struct_proxy(self.argument)(context, b)
            whole.real, whole.imag = parts
            return whole._getvalue()
        if self.dtype in simd.WIDEN:
            wide = simd.WIDEN[self.dtype](b, simd.spread(b, parts[0], 1))
            return b.extract_element(wide, I32(0))
        if self.dtype is DType.BOOL:  # a byte of a user's array may hold anything
            return b.icmp_unsigned("!=", parts[0], I8(0))
        return parts[0]

    def store(
        self, context: Any, b: Builder, value: Value, kind: types.Type, at: Value, access: Access
    ) -> None:
        value = context.cast(b, value, kind, self.argument)
        parts = [value]
        if self.dtype.family is ElementKind.COMPLEX:
            whole = cgutils.create_struct_proxy(self.argument)(context, b, value=value)
            parts = [whole.real, whole.imag]
        elif self.dtype in simd.NARROW:
            narrow = simd.NARROW[self.dtype](b, simd.spread(b, value, 1))
            parts = [b.extract_element(narrow, I32(0))]
        elif self.dtype is DType.BOOL:
            parts = [b.zext(value, I8)]
        for place, part in zip(self._places(b, at), parts, strict=True):
            access(b.store(part, pointer_to(b, place, part.type), align=self.align))

    def _places(self, b: Builder, at: Value) -> list[Value]:
        if self.dtype.family is not ElementKind.COMPLEX:
            return [at]
        return [at, b.gep(at, [I64(self.dtype.itemsize // 2)])]


@dataclass(frozen=True, slots=True)
class _Fields:
    record: RecordType
    aligned: bool

    @property
    def argument(self) -> types.Type:
        # No namedtuple, which refuses names that begin with an underscore.
        kind = type("Record", (tuple,), {"_fields": [field.name for field in self.record.fields]})
        numbers = _numbers(self.record, self.aligned)
        return types.NamedTuple([number.argument for number, _ in numbers], kind)

    @property
    def result(self) -> str:
        return f"an argument, or a tuple of {', '.join(f.name for f in self.record.fields)}"

    def takes(self, kind: types.Type) -> bool:
        numbers = [number for number, _ in _numbers(self.record, self.aligned)]
        if not isinstance(kind, types.BaseTuple) or len(kind) != len(numbers):
            return False
        return all(number.takes(each) for number, each in zip(numbers, kind, strict=True))

    def load(self, context: Any, b: Builder, at: Value, access: Access) -> Value:
        numbers = _numbers(self.record, self.aligned)
        values = [number.load(context, b, b.gep(at, [low]), access) for number, low in numbers]
        return context.make_tuple(b, self.argument, values)

    def store(
        self, context: Any, b: Builder, value: Value, kind: types.Type, at: Value, access: Access
    ) -> None:
        values = cgutils.unpack_tuple(b, value, len(self.record.fields))
        numbers = _numbers(self.record, self.aligned)
        for (number, low), each, of in zip(numbers, values, kind, strict=True):
            number.store(context, b, each, of, b.gep(at, [low]), access)


def _numbers(record: RecordType, aligned: bool) -> list[tuple[_Number, ir.Constant]]:
    """Return the (first) number in each field, and the offset."""
    item = record.itemsize
    return [
        (_Number(f.dtype, _alignment(f.dtype, f.offset, item, aligned)), I64(f.offset))
        for f in record.fields
    ]


@lower_cast(types.NamedTuple, types.Tuple)
@lower_cast(types.NamedTuple, types.UniTuple)
def _as_tuple(context: Any, b: Builder, given: types.Type, wanted: types.Type, value: Value) -> Any:
    """Cast a record to a tuple, field by field: functions return either; Numba has no such cast."""
    values = cgutils.unpack_tuple(b, value, len(given))
    pairs = zip(values, given, wanted, strict=True)
    return context.make_tuple(b, wanted, [context.cast(b, v, one, to) for v, one, to in pairs])


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A record that the function gets in memory: its own copy, or the array's."""

    record: RecordType
    aligned: bool
    copies: bool

    @property
    def argument(self) -> types.Type:
        fields = [(name, *place[:2]) for name, place in (self.record.numpy.fields or {}).items()]
        names, formats, offsets = zip(*fields, strict=True)
        # On CPUs without promises about alignment: arrays lie anywhere.
        layout: Any = {"names": names, "formats": formats, "offsets": offsets}
        return from_dtype(np.dtype(layout | {"itemsize": self.record.itemsize}, align=self.aligned))

    @property
    def result(self) -> str:
        return "an argument, or have a parameter more to write to"

    def takes(self, kind: types.Type) -> bool:
        return bool(kind == self.argument)

    def load(self, context: Any, b: Builder, at: Value, access: Access) -> Value:
        return self.copy(context, b, at) if self.copies else self._argument(context, b, at)

    def copy(self, context: Any, b: Builder, at: Value) -> Value:
        """Return a copy, which the function may write to."""
        copy = room(b, self.record.itemsize)
        move(b, copy, at, self.record.itemsize, self.aligned)
        return self._argument(context, b, copy)

    def store(
        self, context: Any, b: Builder, value: Value, kind: types.Type, at: Value, access: Access
    ) -> None:
        move(b, at, b.bitcast(value, BYTES), self.record.itemsize, self.aligned)

    def _argument(self, context: Any, b: Builder, at: Value) -> Value:
        at = b.addrspacecast(at, BYTES) if at.type.addrspace else at
        return b.bitcast(at, context.get_value_type(self.argument))


@dataclass(frozen=True, slots=True)
class _Widened(_InMemory):
    """A record whose copy has wider types than the array's record: Numba lacks some of those."""

    stored: RecordType
    stored_aligned: bool

    def copy(self, context: Any, b: Builder, at: Value) -> Value:
        """Return a copy, which the function may write to."""
        copy = room(b, self.record.itemsize)
        self._convert(context, b, copy, at, narrow=False)
        return self._argument(context, b, copy)

    def store(
        self, context: Any, b: Builder, value: Value, kind: types.Type, at: Value, access: Access
    ) -> None:
        self._convert(context, b, at, b.bitcast(value, BYTES), narrow=True)

    def _convert(self, context: Any, b: Builder, to: Value, at: Value, narrow: bool) -> None:
        pair = _numbers(self.stored, self.stored_aligned), _numbers(self.record, self.aligned)
        sources, targets = reversed(pair) if narrow else pair
        for field, source, target in zip(self.record.fields, sources, targets, strict=True):
            with cgutils.for_range(b, I64(field.count), intp=I64) as loop:
                x, y = (
                    b.gep(x, [b.add(low, b.mul(loop.index, I64(number.dtype.itemsize)))])
                    for x, (number, low) in ((at, source), (to, target))
                )
                value = source[0].load(context, b, x, unmarked)
                target[0].store(context, b, value, source[0].argument, y, unmarked)


Form: TypeAlias = _Number | _Fields | _InMemory
"""How a function sees an element.

`argument` is an argument's type, `result` the proper result in words, `takes` whether `store` takes
a result with a type.
"""


def form_of(element: ElementType, writes: bool, aligned: bool) -> Form:
    """Return how a function sees elements, and writes to one if `writes`."""
    if not isinstance(element, RecordType):
        return _Number(element, _alignment(element, 0, element.itemsize, aligned))
    if not writes and not any(field.shape for field in element.fields):
        return _Fields(element, aligned)
    wide = widened(element)
    if wide is not element:
        return _Widened(wide, True, True, element, aligned)
    return _InMemory(element, aligned, copies=not writes)


def writable(form: Form, context: Any, b: Builder, at: Value) -> Value:
    """Return a copy of the record at `at`, for a function that writes to it."""
    assert isinstance(form, _InMemory), "only records in memory are written to"
    return form.copy(context, b, at)


def move(b: Builder, to: Value, at: Value, nbytes: int, aligned: bool) -> None:
    """Copy an element; the places may be the same. Elements that are `aligned` go as words."""
    if not aligned:
        cgutils.raw_memmove(b, to, at, I64(nbytes), 1)
        return
    # NVVM would copy byte by byte. A few words at once, so that registers suffice.
    word = alignment(nbytes)
    to, at = (pointer_to(b, x, ir.IntType(8 * word)) for x in (to, at))
    places = [I64(place) for place in range(nbytes // word)]
    for first in range(0, len(places), _AT_ONCE):
        some = places[first : first + _AT_ONCE]
        words = [b.load(b.gep(at, [place]), align=word) for place in some]
        for value, place in zip(words, some, strict=True):
            b.store(value, b.gep(to, [place]), align=word)


def room(b: Builder, nbytes: int) -> Value:
    """Return a pointer to bytes of the function's own, aligned for every type."""
    found = cgutils.alloca_once(b, ir.ArrayType(I8, nbytes))
    found.align = _WIDEST_ALIGN
    return b.bitcast(found, BYTES)
