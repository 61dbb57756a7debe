"""Element types, and the reductions that they support.

The rules, for every algorithm and backend:

- ints wrap around; AVG of ints truncates toward zero;
- bool: SUM, MAX and BOR are "or", PRODUCT, MIN and BAND are "and"; AVG and PREMUL_SUM are refused;
- float16, bfloat16 and the 8-bit floats are widened to float32 for each `a op b` and rounded once,
  to the nearest even; so is AVG's final division;
- MIN and MAX give NaN when either side is NaN, and are refused for complex;
- the product of complex numbers is (ac - bd, ad + bc), each operation rounded separately;
- bitwise operations are for ints and bool;
- PREMUL_SUM multiplies each contribution, in the array's dtype, before it is summed. The factor is
  rounded to the array's dtype (by way of float32 for the narrow floats) and is real: a complex
  number has both parts multiplied. For ints it must be a whole number, at most 2**53 in size,
  taken modulo 2**bits.

ml_dtypes is not imported here: its dtypes are recognised by name at first use.
"""

from __future__ import annotations

import enum
import hashlib
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nc10d.base.run_to_end import import_to_end
from nc10d.ops import ReduceOp


class ElementKind(enum.Enum):
    """The elements' kind, independent of width."""

    BOOL = "bool"
    UINT = "unsigned int"
    INT = "int"
    FLOAT = "float"
    COMPLEX = "complex"
    RECORD = "record"


class DType(enum.Enum):
    """An element type: `label` (the NumPy or ml_dtypes name), `itemsize` in bytes, `family`.

    `code` is the type's number in fingerprints and messages, and never changes.
    """

    BOOL = (0, "bool", 1, ElementKind.BOOL)
    UINT8 = (1, "uint8", 1, ElementKind.UINT)
    INT8 = (2, "int8", 1, ElementKind.INT)
    UINT16 = (3, "uint16", 2, ElementKind.UINT)
    INT16 = (4, "int16", 2, ElementKind.INT)
    UINT32 = (5, "uint32", 4, ElementKind.UINT)
    INT32 = (6, "int32", 4, ElementKind.INT)
    UINT64 = (7, "uint64", 8, ElementKind.UINT)
    INT64 = (8, "int64", 8, ElementKind.INT)
    FLOAT16 = (9, "float16", 2, ElementKind.FLOAT)
    BFLOAT16 = (10, "bfloat16", 2, ElementKind.FLOAT)
    FLOAT8_E4M3FN = (11, "float8_e4m3fn", 1, ElementKind.FLOAT)
    FLOAT8_E5M2 = (12, "float8_e5m2", 1, ElementKind.FLOAT)
    FLOAT32 = (13, "float32", 4, ElementKind.FLOAT)
    FLOAT64 = (14, "float64", 8, ElementKind.FLOAT)
    COMPLEX64 = (15, "complex64", 8, ElementKind.COMPLEX)
    COMPLEX128 = (16, "complex128", 16, ElementKind.COMPLEX)

    code: int
    label: str
    itemsize: int
    family: ElementKind

    def __init__(self, code: int, label: str, itemsize: int, family: ElementKind) -> None:
        self.code = code
        self.label = label
        self.itemsize = itemsize
        self.family = family

    __hash__ = object.__hash__  # Enum's own is Python code, and members are keys on the fast path

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; imports ml_dtypes for the types that NumPy lacks."""
        if self in _FROM_ML_DTYPES:
            extended: np.dtype[Any] = np.dtype(getattr(import_to_end("ml_dtypes"), self.label))
            return extended
        return np.dtype(self.label)


_FROM_ML_DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})
_EXTENDED = {d.label: d for d in _FROM_ML_DTYPES}
NARROW = frozenset(d for d in DType if d.family is ElementKind.FLOAT and d.itemsize < 4)
"""The floats that are computed in float32."""
_DTYPES: dict[np.dtype[Any], DType] = {d.numpy: d for d in DType if d not in _FROM_ML_DTYPES}


@dataclass(frozen=True, slots=True)
class RecordField:
    """A record's field: elements with a type from byte `offset` on; a scalar has no shape."""

    name: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class RecordType:
    """A structured array's element type, with a DType's properties; each dtype has a single one.

    It is `padded` if some bytes belong to no field.
    """

    numpy: np.dtype[Any]
    fields: tuple[RecordField, ...]
    padded: bool
    label: str
    code: int
    family: ElementKind = ElementKind.RECORD

    @property
    def itemsize(self) -> int:
        """An element's bytes."""
        return self.numpy.itemsize


def widened(record: RecordType) -> RecordType:
    """Return the records that a function computes with in memory.

    Floats narrower than float32 are float32 there, truth values in arrays uint8.
    """
    fields: list[Any] = []
    for field in record.fields:
        is_truth = field.dtype is DType.BOOL and bool(field.shape)
        wide = DType.FLOAT32 if field.dtype in NARROW else DType.UINT8 if is_truth else field.dtype
        fields.append((field.name, wide.numpy, field.shape))
    if [each[1] for each in fields] == [field.dtype.numpy for field in record.fields]:
        return record
    found = element_of(np.dtype(fields, align=True))
    assert isinstance(found, RecordType)
    return found


ElementType: TypeAlias = DType | RecordType
_RECORDS: dict[np.dtype[Any], RecordType] = {}
_BY_CODE: dict[int, ElementType] = {dtype.code: dtype for dtype in DType}


def element_of(dtype: np.dtype[Any]) -> ElementType:
    """Return the element type of `dtype`, which may be structured; TypeError as in `dtype_of`."""
    found = _DTYPES.get(dtype) or _RECORDS.get(dtype)
    if found is not None:
        return found
    return _recognise(dtype) if dtype.names is None else _RECORDS.setdefault(dtype, _record(dtype))


def element_by_code(code: int) -> ElementType | None:
    """Return the element type with this code, None if this process has met no such records."""
    return _BY_CODE.get(code)


def _record(dtype: np.dtype[Any]) -> RecordType:
    fields = []
    for name in dtype.names or ():
        inner, offset = dtype.fields[name][:2]  # type: ignore[index]
        base, shape = inner.subdtype or (inner, ())
        if base.names is not None:
            raise TypeError(
                f"arrays of dtype {dtype} can't be communicated: {name!r} is structured"
            )
        fields.append(RecordField(name, dtype_of(base), offset, shape))
    if not fields:
        raise TypeError("arrays of a structured dtype without fields can't be communicated")
    end = 0
    for field in sorted(fields, key=lambda field: field.offset):
        if field.offset < end:
            raise TypeError(f"arrays of dtype {dtype} can't be communicated: fields overlap")
        end = field.offset + field.count * field.dtype.itemsize
    padded = sum(field.count * field.dtype.itemsize for field in fields) < dtype.itemsize
    label = _label(dtype, fields, padded)
    digest = hashlib.blake2b(repr((label, fields, dtype.itemsize)).encode(), digest_size=7)
    code = int.from_bytes(digest.digest(), "little") | 1 << 56  # apart from every DType's
    made = RecordType(dtype, tuple(fields), padded, label, code)
    return _BY_CODE.setdefault(code, made)  # type: ignore[return-value]


def _label(dtype: np.dtype[Any], fields: list[RecordField], padded: bool) -> str:
    """Return a record's type as text: {value: float32, token: int32[4]}, and bytes if `padded`."""
    parts = [
        f"{field.name}: {field.dtype.label}{list(field.shape) if field.shape else ''}"
        for field in fields
    ]
    return "{" + ", ".join(parts) + "}" + (f" in {dtype.itemsize} bytes" if padded else "")


def dtype_of(dtype: np.dtype[Any]) -> DType:
    """Return the element type of `dtype`; a TypeError explains why it is not supported."""
    return _DTYPES.get(dtype) or _recognise(dtype)


def _recognise(dtype: np.dtype[Any]) -> DType:
    """Return and cache the type of an ml_dtypes dtype; TypeError for other dtypes."""
    found = _EXTENDED.get(dtype.name)
    if found is None or not _is_from_ml_dtypes(dtype):
        raise TypeError(f"arrays of dtype {dtype} can't be communicated: {_why_not(dtype)}")
    _DTYPES[dtype] = found
    return found


def alignment(itemsize: int) -> int:
    """Return the bytes to whose multiples elements are aligned in an array that is, at most 8."""
    return min(itemsize & -itemsize, 8)


def scalar(element: ElementType) -> DType:
    """Return the numbers' type; TypeError for records."""
    if isinstance(element, RecordType):
        raise TypeError(f"expected numbers, got records of {element.label}")
    return element


def _is_from_ml_dtypes(dtype: np.dtype[Any]) -> bool:
    return dtype.type.__module__.partition(".")[0] == "ml_dtypes"


_REASONS = {
    "g": "long double has no fixed format; use float64",
    "G": "complex long double has no fixed format; use complex128",
    "O": "it holds references to Python objects; use the object collectives",
    "S": "it holds text; send its bytes as uint8",
    "U": "it holds text; send its bytes as uint8",
    "M": "it holds dates; view it as int64",
    "m": "it holds time differences; view it as int64",
}


def _why_not(dtype: np.dtype[Any]) -> str:
    if dtype.names is not None:
        return "it is structured; send its fields one by one"
    if not dtype.isnative:
        return "it is not in this machine's byte order; use newbyteorder('=')"
    # ml_dtypes reuses characters from NumPy's own types.
    char = "" if _is_from_ml_dtypes(dtype) else dtype.char
    return _REASONS.get(char, "nc10d has no such element type")


_LARGEST_FACTOR = 2**53


def reduced_element(dtype: ElementType, op: ReduceOp, row: int = 1) -> ElementType:
    """Return the elements that `op` reduces in an array with a dtype and this last dimension.

    A user's reduction may see a row with numbers as a record; TypeError for other arrays.
    """
    own = op.pairwise.own
    return dtype if own is None else element_of(own.element((dtype.numpy, row)))


def check_reduce(dtype: ElementType, op: ReduceOp) -> None:
    """Raise TypeError, with the reason, if arrays of `dtype` do not support `op`."""
    reason = op.kind.refuses.get(dtype.family.name)
    if reason is not None:
        raise TypeError(f"{op.name} of {dtype.label}: {reason}")
    if op.factor is None or dtype.family not in (ElementKind.INT, ElementKind.UINT):
        return
    if not float(op.factor).is_integer() or abs(op.factor) > _LARGEST_FACTOR:
        rule = "the factor must be a whole number of at most 2**53 in size"
        raise TypeError(f"PREMUL_SUM of {dtype.label}: {rule}, not {op.factor!r}")


def allows(dtype: ElementType, op: ReduceOp) -> bool:
    """Return whether arrays of `dtype` can be reduced by `op`."""
    try:
        check_reduce(dtype, op)
    except TypeError:
        return False
    return True


def order_matters(op: ReduceOp, dtype: ElementType, size: int) -> bool:
    """Return whether another order of the same operands could change a bit of the result."""
    return size > 2 and dtype.family.name in op.pairwise.rounds


def identity(dtype: ElementType, op: ReduceOp) -> Any:
    """Return the neutral element of the pairwise step of `op`, as a NumPy scalar.

    TypeError if arrays of `dtype` do not support `op`, or `op` has no neutral element.
    """
    check_reduce(dtype, op)
    found = op.pairwise.identity
    if found is None:
        raise TypeError(f"{op.name} has no identity: nc10d.reduction(..., identity=...)")
    if not isinstance(found, str):
        return np.array(found, dtype.numpy)[()]
    lowest, highest = _bounds(scalar(dtype))
    values = {"zero": 0, "one": 1, "ones": -1, "largest": highest, "smallest": lowest}
    return np.array(values[found]).astype(dtype.numpy)[()]


def _bounds(dtype: DType) -> tuple[object, object]:
    """Return the least and the greatest element: infinities where the type has them."""
    if dtype.family is ElementKind.BOOL:
        return False, True
    if dtype.family in (ElementKind.INT, ElementKind.UINT):
        info = np.iinfo(dtype.numpy)
        return info.min, info.max
    infinite = dtype is not DType.FLOAT8_E4M3FN
    return (-np.inf, np.inf) if infinite else (-448.0, 448.0)
