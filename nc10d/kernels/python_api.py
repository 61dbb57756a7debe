"""CPython's C interface in compiled code: calls of Python objects, lists, the GIL, exceptions.

Objects are known by their addresses. The caller holds the GIL, except for take_gil. `call_...` and
`new_...` return a new reference, or 0 with an exception set. The functions of lists return -1 with
an exception set, else 0, and keep the caller's references.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import box, register_model

from nc10d.kernels.hooks import RAISED
from nc10d.kernels.simd import I64, Builder, Value, emits

TYPE_OFFSET, SIZE_OFFSET, ITEMS_OFFSET = 8, 16, 24
"""Where an object has its type, a list or tuple its length, a list the address of its items."""

_L, _I = types.int64, types.int32
call_one = types.ExternalFunction("PyObject_CallOneArg", _L(_L, _L))
call_none = types.ExternalFunction("PyObject_CallNoArgs", _L(_L))
retain = types.ExternalFunction("Py_IncRef", types.void(_L))
release = types.ExternalFunction("Py_DecRef", types.void(_L))
int_value = types.ExternalFunction("PyLong_AsLongLong", _L(_L))
new_bytes = types.ExternalFunction("PyBytes_FromStringAndSize", _L(_L, _L))
new_list = types.ExternalFunction("PyList_New", _L(_L))
append = types.ExternalFunction("PyList_Append", _I(_L, _L))
set_slice = types.ExternalFunction("PyList_SetSlice", _I(_L, _L, _L, _L))
leave_gil = types.ExternalFunction("PyEval_SaveThread", _L())
take_gil = types.ExternalFunction("PyEval_RestoreThread", types.void(_L))


class AnswerType(types.Type):
    """An int that an entry point returns; for RAISED it raises the exception that is set."""

    def __init__(self) -> None:
        super().__init__(name="nc10d_answer")


answer_type = AnswerType()


@register_model(AnswerType)
class _AnswerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, I64)


@box(AnswerType)
def _box_answer(_kind: Any, value: Any, context: Any) -> Any:
    builder, api = context.builder, context.pyapi
    result = builder.alloca(api.pyobj)
    builder.store(ir.Constant(api.pyobj, None), result)  # a null pointer: an exception is set
    with builder.if_then(builder.icmp_signed("!=", value, I64(RAISED))):
        builder.store(api.long_from_longlong(value), result)
    return builder.load(result)


@emits(answer_type(types.int64))
def as_answer(_builder: Builder, value: Value) -> Value:
    """Return an int as an entry point's answer."""
    return value
