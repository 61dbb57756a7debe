"""Kernels for reductions that users write: a loop around a Python function, compiled by Numba.

Contract: as in `reduce`: void(dst, a, b, nbytes) for the step, void(dst, src, arg, nbytes) for a
map. `element_forms` has what the function gets and returns. A function that raises, allocates or
calls the interpreter is a TypeError.

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
from functools import partial
from typing import Any

import numba
from numba import errors, types
from numba.extending import intrinsic

from nc10d.arrays.dtypes import ElementType, RecordType
from nc10d.kernels.loops import compile_kernel
from nc10d.kernels.own.element_forms import BYTES, Access, Form, form_of, move, unmarked, writable
from nc10d.kernels.own.refusals import LOOP, RAISES, fault_of, line_of, quoting, refusal, refusals
from nc10d.kernels.simd import I32, I64, Builder, Value
from nc10d.ops.own_reductions import MOST_BYTES, Function, OwnReduction, copied

_OPERANDS = {"step": 2, "map": 1, "finish": 1}
_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NO_WRAP = ("nsw", "nuw")


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


# A function's work on an element


def _check_function(function: Function, operands: int, element: ElementType) -> bool:
    """Return whether a function writes to its last parameter; TypeError if it can't be compiled."""
    if function.__code__.co_flags & _NOT_PLAIN:
        raise refusal(function, "it must be a plain function: without async def and yield")
    given = len(inspect.signature(function).parameters)
    if given not in (operands, operands + 1):
        must = f"it must have {operands} parameters, or one more to write to"
        raise refusal(function, f"{must}: it has {given}")
    if element.itemsize > MOST_BYTES:
        raise refusal(function, f"a record has at most {MOST_BYTES} bytes, not {element.itemsize}")
    writes = given > operands
    if writes and not isinstance(element, RecordType):
        raise refusal(function, "a number can't be written to: return the result")
    return writes


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
    writes = _check_function(function, operands, element)
    form = form_of(element, writes, aligned)
    with quoting(function):
        arguments = (form.argument,) * (operands + writes)

    def emit(
        context: Any, b: Builder, to: Value, places: Sequence[Value], access: Access = unmarked
    ) -> None:
        compiled = compile(function, arguments)
        called = numba.typeof(compiled)  # refers to it weakly
        signature = called.get_call_type(context.typing_context, arguments, {})
        _check_result(function, form, signature.return_type, writes)
        compute = context.get_function(called, signature)
        values = [form.load(context, b, at, access) for at in places]
        if writes:
            result, kind = writable(form, context, b, places[0]), form.argument
            compute(b, [*values, result])
        else:
            result, kind = compute(b, values), signature.return_type
        if isinstance(element, RecordType) and element.padded:
            move(b, to, places[0], item, aligned)
        form.store(context, b, result, kind, to, access)

    return emit


# The loop


def _loop(emit: Callable[..., None], item: int, operands: int) -> Any:
    """Return the function of (dst, a, b, nbytes) that does a part's work on every element."""

    @intrinsic
    def loop(_typing: Any, _dst: Any, _a: Any, _b: Any, _nbytes: Any) -> Any:
        def generate(context: Any, b: Builder, _signature: Any, given: Sequence[Value]) -> Value:
            dst, *sources = (b.inttoptr(x, BYTES) for x in given[: 1 + operands])
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
