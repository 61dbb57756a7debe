"""Kernels for reductions that users write: a loop around a Python function, compiled by Numba.

Contract: as in `reduce`: void(dst, a, b, nbytes) for the step, void(dst, src, arg, nbytes) for a
map. The function gets elements as values:

| element | the function gets | and returns |
|---|---|---|
| a number | Numba's scalar; float32 for the narrow floats | a number, rounded to the type once |
| a record with scalars only | a named tuple | an argument, or a tuple with all fields |
| a record with arrays in it | Numba's record, in memory | an argument |

A function with a further parameter writes to that record in memory, at first a copy of the first
argument. A function that raises, allocates or calls the interpreter is a TypeError.

The loop promises LLVM that iterations do not depend on each other, so that the loop becomes vector
code also where dst is an operand (`llvm.mem.parallel_loop_access`).

`own_part` emits a function's work on one element, for any loop. A loop on a GPU (`gpu.gpu_reduce`)
compiles the function for the device, and relies on aligned fields.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numba
import numpy as np
from llvmlite import ir
from numba import errors, types
from numba.core import cgutils
from numba.extending import intrinsic, lower_cast
from numba.np.numpy_support import from_dtype

from nc10d.arrays.dtypes import DType, ElementKind, ElementType, RecordType, alignment, widened
from nc10d.kernels import simd
from nc10d.kernels.loops import compile_kernel
from nc10d.kernels.own.refusals import LOOP, RAISES, fault_of, line_of, quoting, refusal, refusals
from nc10d.kernels.simd import I8, I32, I64, Builder, Value, pointer_to
from nc10d.ops.own_reductions import MOST_BYTES, Function, OwnReduction, copied

_OPERANDS = {"step": 2, "map": 1, "finish": 1}
_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_WIDEST_ALIGN = 16
_AT_ONCE = 8
_BYTES = I8.as_pointer()
_NO_WRAP = ("nsw", "nuw")
_KINDS = types.Boolean, types.Integer, types.Float, types.Complex
_WIDEST = {"BOOL": 1, "UINT": 2, "INT": 2, "FLOAT": 3, "COMPLEX": 4}
"""How many kinds from the list a family takes as results: no float for an int."""


def own_kernel(symbol: str, own: OwnReduction, part: str, element: ElementType) -> Any:
    """Compile a reduction's part, or load the code; TypeError for a function that is refused."""
    loop = _loop(own_part(own, part, element), element.itemsize, _OPERANDS[part])

    def kernel(dst, a, b, nbytes):  # type: ignore[no-untyped-def]
        """dst[:] = function(a, b), element by element"""
        loop(dst, a, b, nbytes)

    with refusals():
        return compile_kernel(kernel, symbol)


def _jitted(function: Any, **options: bool) -> Any:
    """Return a function for Numba to compile, with the functions that it calls."""
    copy = copied(function, partial(_jitted, **options))
    return numba.njit(error_model="numpy", **options)(copy)


def _form_of(
    function: Function, operands: int, element: ElementType, aligned: bool
) -> tuple[Form, bool]:
    """Return how a function sees elements, and whether it writes to its last parameter."""
    if function.__code__.co_flags & _NOT_PLAIN:
        raise refusal(function, "it must be a plain function: without async def and yield")
    given = len(inspect.signature(function).parameters)
    if given not in (operands, operands + 1):
        must = f"it must have {operands} parameters, or one more to write to"
        raise refusal(function, f"{must}: it has {given}")
    if element.itemsize > MOST_BYTES:
        raise refusal(function, f"a record has at most {MOST_BYTES} bytes, not {element.itemsize}")
    writes = given > operands
    if not isinstance(element, RecordType):
        if writes:
            raise refusal(function, "a number can't be written to: return the result")
        return _Number(element, _alignment(element, 0, element.itemsize, aligned)), False
    if not writes and not any(field.shape for field in element.fields):
        return _Fields(element, aligned), False
    wide = widened(element)
    if wide is not element:
        return _Widened(wide, True, True, element, aligned), writes
    return _InMemory(element, aligned, copies=not writes), writes


def _alignment(dtype: DType, offset: int, itemsize: int, aligned: bool) -> int:
    """Return how a number at `offset` in each element is aligned, in arrays that are `aligned`."""
    part = dtype.itemsize // (2 if dtype.family is ElementKind.COMPLEX else 1)
    places = offset | itemsize | part
    return places & -places if aligned else 1


# How elements become arguments

Access = Callable[[Value], Value]
"""Marks an access to memory in the loop."""


def _unmarked(instruction: Value) -> Value:
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
        move(b, at, b.bitcast(value, _BYTES), self.record.itemsize, self.aligned)

    def _argument(self, context: Any, b: Builder, at: Value) -> Value:
        at = b.addrspacecast(at, _BYTES) if at.type.addrspace else at
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
        self._convert(context, b, at, b.bitcast(value, _BYTES), narrow=True)

    def _convert(self, context: Any, b: Builder, to: Value, at: Value, narrow: bool) -> None:
        pair = _numbers(self.stored, self.stored_aligned), _numbers(self.record, self.aligned)
        sources, targets = reversed(pair) if narrow else pair
        for field, source, target in zip(self.record.fields, sources, targets, strict=True):
            with cgutils.for_range(b, I64(field.count), intp=I64) as loop:
                x, y = (
                    b.gep(x, [b.add(low, b.mul(loop.index, I64(number.dtype.itemsize)))])
                    for x, (number, low) in ((at, source), (to, target))
                )
                value = source[0].load(context, b, x, _unmarked)
                target[0].store(context, b, value, source[0].argument, y, _unmarked)


Form: TypeAlias = _Number | _Fields | _InMemory
"""How a function sees an element.

`argument` is an argument's type, `result` the proper result in words, `takes` whether `store` takes
a result with a type.
"""


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


# A function's work on an element

Compile = Callable[[Function, tuple[types.Type, ...]], Any]
"""Compiles a function for its arguments' types; returns Numba's dispatcher."""


def compile_on_cpu(function: Function, arguments: tuple[types.Type, ...]) -> Any:
    """Compile a function; TypeError if it can't be, or may raise, allocate or call Python."""
    compiled = _jitted(function, forceinline=True)
    with quoting(function):
        compiled.compile(arguments)
    (result,) = compiled.overloads.values()
    kind, in_memory = result.signature.return_type, isinstance(arguments[0], types.Record)
    if isinstance(kind, types.Optional):
        raise refusal(function, "a branch returns nothing")
    fault = fault_of(result)
    if fault is not None:
        # Compiled again, with lines, only for the message.
        (lined,) = _with_lines(function, arguments).overloads.values()
        why, line = fault[0], line_of(function, "RAISE_VARARGS") if fault[0] == RAISES else 0
        if not line and in_memory:
            why += LOOP
        raise refusal(function, why, line or (fault_of(lined) or fault)[1])
    if in_memory and kind == types.none:
        known = result.library._final_module.get_function(result.fndesc.llvm_func_name)
        *_, last = given = [each for each in known.arguments if each.name.startswith("arg.")]
        if not all({b"readonly", b"readnone"} & {*x.attributes} for x in given if x is not last):
            raise refusal(function, "it writes to an argument that is not its last parameter")
    return compiled


def _with_lines(function: Function, arguments: tuple[types.Type, ...]) -> Any:
    again = _jitted(function, debug=True)
    with warnings.catch_warnings():  # that the source can't be read
        warnings.simplefilter("ignore", errors.NumbaDebugInfoWarning)
        again.compile(arguments)
    return again


def _check_result(function: Function, form: Form, kind: types.Type, writes: bool) -> None:
    if writes and kind != types.none:
        raise refusal(function, f"it writes to its last parameter, and returns {kind} as well")
    if not (writes or form.takes(kind)):
        raise refusal(function, f"it must return {form.result}, not {kind}")


def own_part(
    own: OwnReduction,
    part: str,
    element: ElementType,
    compile: Compile = compile_on_cpu,
    aligned: bool = False,
) -> Callable[..., None]:
    """Return the function that emits `to` = part(`places`): context, builder, to, places, access.

    `to` and `places` are pointers to bytes, `aligned` as their type asks, or not. TypeError, also
    when the code is emitted, for a function that can't be compiled.
    """
    function, operands, item = own.functions[part], _OPERANDS[part], element.itemsize
    form, writes = _form_of(function, operands, element, aligned)
    with quoting(function):
        arguments = (form.argument,) * (operands + writes)

    def emit(
        context: Any, b: Builder, to: Value, places: Sequence[Value], access: Access = _unmarked
    ) -> None:
        compiled = compile(function, arguments)
        called = numba.typeof(compiled)  # refers to it weakly
        signature = called.get_call_type(context.typing_context, arguments, {})
        _check_result(function, form, signature.return_type, writes)
        compute = context.get_function(called, signature)
        values = [form.load(context, b, at, access) for at in places]
        if isinstance(form, _InMemory) and writes:
            result, kind = form.copy(context, b, places[0]), form.argument
            compute(b, [*values, result])
        else:
            result, kind = compute(b, values), signature.return_type
        if isinstance(element, RecordType) and element.padded:
            move(b, to, places[0], item, aligned)
        form.store(context, b, result, kind, to, access)

    return emit


def room(b: Builder, nbytes: int) -> Value:
    """Return a pointer to bytes of the function's own, aligned for every type."""
    found = cgutils.alloca_once(b, ir.ArrayType(I8, nbytes))
    found.align = _WIDEST_ALIGN
    return b.bitcast(found, _BYTES)


# The loop


def _loop(emit: Callable[..., None], item: int, operands: int) -> Any:
    """Return the function of (dst, a, b, nbytes) that does a part's work on every element."""

    @intrinsic
    def loop(_typing: Any, _dst: Any, _a: Any, _b: Any, _nbytes: Any) -> Any:
        def generate(context: Any, b: Builder, _signature: Any, given: Sequence[Value]) -> Value:
            dst, *sources = (b.inttoptr(x, _BYTES) for x in given[: 1 + operands])
            with _each(b, given[3], item) as (low, access):
                to, *places = (b.gep(x, [low]) for x in (dst, *sources))
                emit(context, b, to, places, access)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return loop


@contextlib.contextmanager
def _each(b: Builder, nbytes: Value, item: int) -> Iterator[tuple[Value, Access]]:
    """Emit a loop over elements; yield an element's first byte, and the mark for accesses."""
    count = b.sdiv(nbytes, I64(item))
    before, body = b.basic_block, b.append_basic_block("element")
    behind = b.append_basic_block("behind")
    b.cbranch(b.icmp_signed(">", count, I64(0)), body, behind)
    b.position_at_end(body)
    mark = b.module.add_metadata([I32(len(b.module.metadata))])
    mark.operands = (mark,)  # a loop's name refers to itself

    def access(instruction: Value) -> Value:
        instruction.set_metadata("llvm.mem.parallel_loop_access", mark)
        return instruction

    index = b.phi(I64)
    index.add_incoming(I64(0), before)
    yield b.mul(index, I64(item), flags=_NO_WRAP), access
    following = b.add(index, I64(1), flags=_NO_WRAP)
    index.add_incoming(following, b.basic_block)
    again = b.cbranch(b.icmp_signed("<", following, count), body, behind)
    again.set_metadata("llvm.loop", mark)
    b.position_at_end(behind)
