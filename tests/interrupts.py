"""Errors of a signal's handler at each instruction of a call.

A timer hits a window of some microseconds once in a thousand runs. Here a trace function counts
instructions, and rings before a chosen one. Python runs the handler at its next look at signals: at
the end of a call of C code, at the start of a Python function, at a loop's next round. The trace
function is compiled, as Python would look at signals in one that is written in Python.
"""

import ctypes
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

_NEW_FRAME, _INSTRUCTION = 0, 7  # PyTrace_CALL, PyTrace_OPCODE of cpython/pystate.h


def _of_python(name: str, result: Any, *arguments: Any) -> Any:
    address = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(result, *arguments)(address)


_set_attribute = _of_python("PyObject_SetAttrString", ctypes.c_int, *[ctypes.c_void_p] * 3)
_interrupt = _of_python("PyErr_SetInterruptEx", ctypes.c_int, ctypes.c_int)
# Python 3.13 counts the instructions of frames with both; it calls no f_trace of theirs.
_opcodes, _own = map(ctypes.create_string_buffer, (b"f_trace_opcodes", b"f_trace"))
_opcodes_at, _own_at = ctypes.addressof(_opcodes), ctypes.addressof(_own)
_true_at, _alarm = id(True), int(signal.SIGALRM)
_left = np.zeros(1, np.int64)
_left_at = _left.ctypes.data


@intrinsic
def _count_down(_: Any, address: Any) -> Any:
    """Take one off the int64 at an address, and return what is left."""

    def emit(__: Any, b: Any, ___: Any, arguments: Any) -> Any:
        left = b.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        b.store(b.sub(b.load(left), ir.Constant(ir.IntType(64), 1)), left)
        return b.load(left)

    return types.int64(types.int64), emit


@cfunc(types.int32(types.voidptr, types.voidptr, types.int32, types.voidptr))
def _trace(_: Any, frame: Any, what: Any, __: Any) -> Any:
    if what == _NEW_FRAME:
        return _set_attribute(frame, _own_at, _true_at) + _set_attribute(
            frame, _opcodes_at, _true_at
        )
    if what == _INSTRUCTION and _count_down(_left_at) == -1:
        _interrupt(_alarm)
    return 0


_start = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
    ctypes.cast(ctypes.pythonapi.PyEval_SetTrace, ctypes.c_void_p).value
)


class _Reports:
    """The hook for errors that Python drops, but not for those of a thread that could not begin.

    If a handler's error comes as a thread begins, `threading.Thread.start` deletes the entry that
    the thread itself is about to delete. The thread's own KeyError may come after the test.
    """

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook = hook

    def __call__(self, what: Any) -> None:
        trace, name = what.exc_traceback, ""
        while trace is not None:
            name, trace = trace.tb_frame.f_code.co_name, trace.tb_next
        if what.exc_type is not KeyError or name != "_bootstrap_inner":
            self._hook(what)


def raise_at(
    instruction: int, error: BaseException, call: Callable[[], object], patience: float = 0
) -> bool:
    """Call `call`; raise `error` in a handler of SIGALRM before instruction `instruction` of it.

    Instructions count from 0. Returns False if the call ended before that; the error must come out
    of the call otherwise. Python drops what is raised amid a finalizer or a callback from C. With
    `patience`, the error comes after so many seconds at the latest, and again so long after a drop.
    Without it, the call gets one error, however slowly it runs.
    """
    raised, dropped, came_out = False, False, False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise error

    def on_drop(what: Any) -> None:
        nonlocal raised, dropped
        if what.exc_value is error:
            raised, dropped = False, True
            signal.setitimer(signal.ITIMER_REAL, patience)

    hook, sys.unraisablehook = sys.unraisablehook, on_drop
    outer, before = sys.gettrace(), signal.signal(signal.SIGALRM, handler)
    _left[0] = instruction
    signal.setitimer(signal.ITIMER_REAL, patience)
    try:
        _start(_trace.address, None)
        call()
        _start(None, None)
    except BaseException as out:
        _start(None, None)
        if out is not error:
            raise
        came_out = True
    finally:
        swallowed = raised and not came_out and not dropped
        raised = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Not the default, which ends the process: an alarm may be under way.
        signal.signal(signal.SIGALRM, before if callable(before) else signal.SIG_IGN)
        sys.unraisablehook = hook if isinstance(hook, _Reports) else _Reports(hook)
        sys.settrace(outer)
    assert not swallowed, f"the error at instruction {instruction} did not come out"
    return bool(_left[0] < 0)


def call_at(instruction: int, act: Callable[[], object], call: Callable[[], object]) -> bool:
    """Call `call`, and amid it `act`, in a handler of SIGALRM, before that instruction of `call`.

    Returns False if the call ended before that.
    """
    due = True

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal due
        if due:
            due = False
            _start(None, None)
            act()

    outer, before = sys.gettrace(), signal.signal(signal.SIGALRM, handler)
    _left[0] = instruction
    try:
        _start(_trace.address, None)
        call()
    finally:
        _start(None, None)
        due = False
        signal.signal(signal.SIGALRM, before if callable(before) else signal.SIG_IGN)
        sys.settrace(outer)
    return bool(_left[0] < 0)
