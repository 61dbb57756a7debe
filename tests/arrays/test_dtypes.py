"""Element types are recognised, or refused with the reason; reductions likewise."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from nc10d.arrays.dtypes import DType, check_reduce, dtype_of
from nc10d.ops import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, premul_sum

FLOATS = [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2]
FLOATS += [DType.FLOAT32, DType.FLOAT64]
COMPLEX = [DType.COMPLEX64, DType.COMPLEX128]


@pytest.mark.parametrize("dtype", DType, ids=lambda d: d.label)
def test_every_type_is_recognised_by_its_numpy_dtype(dtype):
    assert dtype_of(dtype.numpy) is dtype
    assert dtype_of(np.empty(0, dtype.numpy).dtype) is dtype
    assert dtype.numpy.itemsize == dtype.itemsize


def test_codes_differ_and_fit_a_byte():
    assert sorted(d.code for d in DType) == list(range(len(DType)))


@pytest.mark.parametrize("name", ["int_", "longlong", "intc", "uintc", "ulonglong", "short"])
def test_c_names_of_ints_are_the_sized_types(name):
    dtype = np.dtype(name)
    assert dtype_of(dtype).itemsize == dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (np.longdouble, "float64"),
        (np.clongdouble, "complex128"),
        (object, "Python objects"),
        ("U3", "text"),
        ("S3", "text"),
        ("M8[s]", "int64"),
        ("m8[s]", "int64"),
        ([("a", "f4"), ("b", "i4")], "structured"),
        (">f4", "byte order"),
        (">c16", "byte order"),
        ("V4", "no such element type"),
        (ml_dtypes.int4, "no such element type"),
        (ml_dtypes.float8_e4m3fnuz, "no such element type"),
        (ml_dtypes.float8_e4m3b11fnuz, "no such element type"),
    ],
)
def test_other_dtypes_are_refused_with_the_reason(dtype, reason):
    with pytest.raises(TypeError, match=reason):
        dtype_of(np.dtype(dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=lambda d: d.label)
@pytest.mark.parametrize("op", [BAND, BOR, BXOR], ids=repr)
def test_bitwise_operations_are_for_ints_and_bool(dtype, op):
    with pytest.raises(TypeError, match="bitwise"):
        check_reduce(dtype, op)


@pytest.mark.parametrize("dtype", COMPLEX, ids=lambda d: d.label)
@pytest.mark.parametrize("op", [MIN, MAX], ids=repr)
def test_complex_numbers_have_no_order(dtype, op):
    with pytest.raises(TypeError, match="order"):
        check_reduce(dtype, op)


@pytest.mark.parametrize("op", [AVG, premul_sum(2.0)], ids=repr)
def test_truth_values_are_neither_averaged_nor_scaled(op):
    with pytest.raises(TypeError, match="bool"):
        check_reduce(DType.BOOL, op)


@pytest.mark.parametrize("factor", [0.5, float("nan"), float("inf"), 2.0**60])
def test_ints_are_scaled_by_whole_numbers_only(factor):
    with pytest.raises(TypeError, match="whole number"):
        check_reduce(DType.INT32, premul_sum(factor))
    check_reduce(DType.INT32, premul_sum(-3.0))
    check_reduce(DType.FLOAT32, premul_sum(factor))


def test_reductions_that_are_not_refused_are_allowed():
    for dtype in set(DType) - set(COMPLEX) - set(FLOATS) - {DType.BOOL}:
        for op in (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, premul_sum(3)):
            check_reduce(dtype, op)


def test_ml_dtypes_is_not_imported_by_the_table():
    code = "import sys, nc10d.arrays.dtypes; sys.exit('ml_dtypes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
