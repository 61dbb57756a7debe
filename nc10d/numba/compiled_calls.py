"""The calls of nc10d.numba: in Python, in compiled code, and the slow way between the two.

The first call of a kind and size goes through Python, which publishes its prepared call. Later
calls find that in compiled code and take no GIL (backend/cpu/native/raw_calls.py). Compiled code
refers to both by names that the linker learns below, so that Numba may keep the code in a file.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from threading import get_ident
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, errors
from numba.extending import intrinsic, overload
from numba.np.numpy_support import as_dtype
from numba.types import Type

from nc10d import ops
from nc10d.arrays.dtypes import DType, dtype_of
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import raw_calls as raw
from nc10d.backend.cpu.native.cpython import TYPE_OFFSET, words_at
from nc10d.group import world
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array, Op
from nc10d.ops.reductions import REDUCE_OPS

_ALL_REDUCE, _BROADCAST, _BARRIER = range(3)
_SEND, _RECV = raw.MESSAGES, raw.MESSAGES + 1
_DTYPES, _REDUCTIONS = 1 << 6, 1 << 12  # a key: kind + 64 * (dtype's code + 64 * reduction)
_MOST_BLOCKS = 4096
"""Calls that are published at most: their blocks are kept, since a thread may be reading them."""
_BY_CODE = {dtype.code: dtype for dtype in DType}
_enumerated: Any = enum.IntEnum
Reductions = _enumerated("Reductions", {op.kind.name: op.kind.number for op in REDUCE_OPS})
"""The reductions without a factor, as compiled code takes them: Numba knows no ReduceOp."""
_SUM = Reductions.SUM


# Outside compiled code


def all_reduce(x: Array, op: int = _SUM) -> None:
    """Reduce `x` over the default group in place; `op` is SUM, MAX, ... in this module. Blocks."""
    world.get_default_group().all_reduce(x, REDUCE_OPS[Reductions(op)])


def broadcast(x: Array, src: int) -> None:
    """Copy rank `src`'s `x` into every rank's. Blocks."""
    world.get_default_group().broadcast(x, src)


def send(x: Array, dst: int, tag: int = 0) -> None:
    """Send `x` to rank `dst`; block until `x` may be changed again."""
    world.get_default_group().send(x, dst, tag)


def recv(x: Array, src: int, tag: int = 0) -> None:
    """Receive `x`, in the size that is sent, from rank `src`. Blocks."""
    world.get_default_group().recv(x, src, tag)


def barrier() -> None:
    """Block until every rank has called."""
    world.get_default_group().barrier()


# The slow way: from compiled code to Python, and back a block for the next time


_table = np.zeros(raw.BUCKETS, np.int64)
_state = np.zeros(2, np.int64)
_blocks: dict[int, tuple[object, Any, Any]] = {}
"""By address: the block, what runs its call, and the prepared call."""
_raised: dict[int, BaseException] = {}
"""By thread: the last error, kept until compiled code has raised it."""


def _array(key: int, count: int, data: int) -> object:
    dtype = _BY_CODE[key // _DTYPES % 64].numpy
    if not count:
        return np.empty(0, dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(data)
    return np.frombuffer(memoryview(memory), dtype)


def _operation(key: int, x: object, rank: int, tag: int) -> Op:
    kind = key % _DTYPES + (key & raw.MESSAGES)
    if kind == _ALL_REDUCE:
        return ops.AllReduce(x, REDUCE_OPS[(key & (raw.MESSAGES - 1)) // _REDUCTIONS])
    if kind == _BROADCAST:
        return ops.Broadcast(x, rank)
    if kind == _BARRIER:
        return ops.Barrier()
    return ops.Send(x, rank, tag) if kind == _SEND else ops.Recv(x, rank, tag)


def _answer(request: int) -> int:
    """Complete a call; return 0, or the address of the exception that it raises."""
    key, count, rank, tag, data, block, answer = words_at(request, raw.REQUEST_WORDS)
    try:
        x = _array(key, count, data)
        if answer in (at.BUSY, at.NEW_SITE):
            group = world.get_default_group()
            group.refuse_in_batch("a call of compiled code")  # at a block's end, arrays may be gone
            op = _operation(key, x, rank, tag)
            group._run(op, x, False, None)
            if not block:
                _publish(group, op, key, count, rank)
        else:
            _, launcher, prepared = _blocks[block]
            y = tag if key & raw.MESSAGES else x
            try:
                launcher.finish(prepared, answer, x, y, world.get_default_group().timeout)
            except BaseException:
                launcher.abandon(prepared, x, y)
                raise
    except BaseException as error:  # noqa: BLE001  (compiled code raises the error)
        _raised[get_ident()] = error
        return id(error)
    return 0


def _publish(group: ProcessGroup, op: Op, key: int, count: int, rank: int) -> None:
    """Let compiled code find the prepared call of an operation, if there is any."""
    launcher: Any = group._preparing
    cache = getattr(launcher, "cache", None)
    # Ranks as threads have separate default groups.
    if cache is None or world.own_worlds or len(_blocks) >= _MOST_BLOCKS:
        return
    found = cache.find((op,))
    if found is None or found[0].bulky:
        return
    prepared = found[0]
    message = key & raw.MESSAGES
    program = prepared.address if message else prepared.words[at.K_PROGRAM // 8]
    first = raw.bucket(key, count, rank)
    fields = {
        raw.B_NEXT: _table[first],
        raw.B_KEY: key,
        raw.B_COUNT: count,
        raw.B_RANK: rank,
        raw.B_CHANNEL: prepared.channel.address,
        raw.B_PROGRAM: program,
        raw.B_DIRECT: group.direct.ctypes.data,
    }
    block = np.zeros(len(fields), np.int64)
    for offset, value in fields.items():
        block[offset // 8] = value
    address = int(block.ctypes.data)
    # The group, too: `direct` is its word.
    _blocks[address] = (block, group), launcher, prepared
    _table[first] = address


def forget() -> None:
    """Send all calls through Python again: the default group is another for some threads."""
    _table[:] = 0


_callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(_answer)
_state[raw.S_TABLE // 8] = _table.ctypes.data
_state[raw.S_SLOW // 8] = ctypes.cast(_callback, ctypes.c_void_p).value or 0
llvmlite.binding.add_symbol("nc10d_numba_state", int(_state.ctypes.data))
llvmlite.binding.add_symbol("nc10d_numba_call", raw.raw_call_address())
world.on_own_world.append(forget)


# Inside compiled code: Numba asks that an overload and its implementation have one signature

_I64 = ir.IntType(64)
_call = types.ExternalFunction("nc10d_numba_call", types.int64(*(types.int64,) * 6))


@intrinsic
def _state_address(_context: object) -> tuple[Type, Callable[..., object]]:
    """Return the state's address."""

    def generate(
        _: object, builder: ir.IRBuilder, _signature: object, _arguments: object
    ) -> object:
        kind = ir.FunctionType(ir.VoidType(), [])
        symbol = cgutils.get_or_insert_function(builder.module, kind, "nc10d_numba_state")
        return builder.ptrtoint(symbol, _I64)

    return types.int64(), generate


@intrinsic
def _raise_from(_context: object, status: Type) -> tuple[Type, Callable[..., object]]:
    """Raise the exception at an address, unless that is 0."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: object, arguments: Any) -> object:
        (error,) = arguments
        with builder.if_then(builder.icmp_signed("!=", error, _I64(0)), likely=False):
            module, state = builder.module, ir.IntType(32)
            ensure = cgutils.get_or_insert_function(
                module, ir.FunctionType(state, []), "PyGILState_Ensure"
            )
            release = cgutils.get_or_insert_function(
                module, ir.FunctionType(ir.VoidType(), [state]), "PyGILState_Release"
            )
            assign = cgutils.get_or_insert_function(
                module, ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t] * 2), "PyErr_SetObject"
            )
            held = builder.call(ensure, [])
            place = builder.inttoptr(
                builder.add(error, _I64(TYPE_OFFSET)), cgutils.voidptr_t.as_pointer()
            )
            value = builder.inttoptr(error, cgutils.voidptr_t)
            builder.call(assign, [builder.load(place), value])
            builder.call(release, [held])
            context.call_conv.return_exc(builder)
        return context.get_dummy_value()

    return types.void(status), generate


def _key(call: str, x: object, kind: int, written: bool) -> int:
    """Return the key of a call on arrays of a Numba type; TypingError if it can't take them."""
    if not isinstance(x, types.Array) or x.layout != "C":
        raise errors.TypingError(f"nc10d.numba.{call} needs a C-contiguous array, got {x}")
    if written and not x.mutable:
        raise errors.TypingError(f"nc10d.numba.{call} writes its array, which is read-only: {x}")
    try:
        return kind + _DTYPES * dtype_of(as_dtype(x.dtype)).code
    except (TypeError, NotImplementedError) as error:
        raise errors.TypingError(f"nc10d.numba.{call}: {error}") from error


def _require_integers(call: str, **arguments: object) -> None:
    """Raise TypingError for ranks and tags that are floats: Numba would cut them to integers."""
    for name, kind in arguments.items():
        if isinstance(kind, (types.Float, types.Complex)):
            raise errors.TypingError(f"nc10d.numba.{call}: {name} must be an integer, got {kind}")


def _check(status: int) -> None:
    """Raise the error of a call, inside compiled code."""


@overload(_check, inline="always")
def _check_compiled(status: int) -> Callable[..., None]:
    unknown = raw.NO_THREAD

    def check(status: int) -> None:
        if status == unknown:
            raise RuntimeError("nc10d.numba: this thread is none of Python's (prange?)")
        _raise_from(status)

    return check


@overload(all_reduce)
def _all_reduce_compiled(x: Array, op: Any = _SUM) -> Callable[..., None]:
    key, step = _key("all_reduce", x, _ALL_REDUCE, True), _REDUCTIONS

    def call(x: Array, op: Any = _SUM) -> None:
        whole = key + step * op.value
        _check(_call(_state_address(), whole, x.size, 0, 0, x.ctypes.data))

    return call


@overload(broadcast)
def _broadcast_compiled(x: Array, src: int) -> Callable[..., None]:
    key = _key("broadcast", x, _BROADCAST, True)
    _require_integers("broadcast", src=src)

    def call(x: Array, src: int) -> None:
        _check(_call(_state_address(), key, x.size, src, 0, x.ctypes.data))

    return call


@overload(send)
def _send_compiled(x: Array, dst: int, tag: int = 0) -> Callable[..., None]:
    key = _key("send", x, _SEND, False)
    _require_integers("send", dst=dst, tag=tag)

    def call(x: Array, dst: int, tag: int = 0) -> None:
        _check(_call(_state_address(), key, x.size, dst, tag, x.ctypes.data))

    return call


@overload(recv)
def _recv_compiled(x: Array, src: int, tag: int = 0) -> Callable[..., None]:
    key = _key("recv", x, _RECV, True)
    _require_integers("recv", src=src, tag=tag)

    def call(x: Array, src: int, tag: int = 0) -> None:
        _check(_call(_state_address(), key, x.size, src, tag, x.ctypes.data))

    return call


@overload(barrier)
def _barrier_compiled() -> Callable[..., None]:
    key = _BARRIER

    def call() -> None:
        _check(_call(_state_address(), key, 0, 0, 0, 0))

    return call
