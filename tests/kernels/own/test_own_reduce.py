"""Kernels of one's own reductions: the bits of Python itself, vector code, and what is refused."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d
from nc10d.arrays.dtypes import DType, ElementKind, element_of
from nc10d.kernels import cache, reduce
from nc10d.kernels.own.own_reduce import own_kernel
from nc10d.kernels.reduce import kernel_address
from nc10d.ops import ReduceOp
from nc10d.testing import reference
from nc10d.testing.strategies import mixed_values

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
GUARD = 64
SIGNED = [d for d in DType if d.family is not ElementKind.BOOL]

Mixed = np.dtype([("key", "f4"), ("low", "u1"), ("count", "i8"), ("weight", "f2"), ("z", "c8")])
Stacked = np.dtype([("n", "i2"), ("rows", "f4", (2, 3)), ("last", "f8")])
Kept = np.dtype([("key", "f8"), ("payload", "u1", (33,))])
Line = np.dtype([("slope", "f8"), ("offset", "f8")])


@nc10d.reduction(Mixed)
def mixed(a: Any, b: Any) -> Any:
    if b.key < a.key:
        return b
    return a.key, b.low, a.count - b.count, a.weight, b.z


@nc10d.reduction(Stacked)
def stacked(a: Any, b: Any, out: Any) -> None:
    out.n = a.n + b.n
    for i in range(2):
        for j in range(3):
            out.rows[i, j] = a.rows[i, j] - b.rows[1 - i, j]


@nc10d.reduction(Kept)
def kept(a: Any, b: Any) -> Any:
    return b if b.key < a.key else a


@nc10d.reduction(Line)
def composed(a: Any, b: Any) -> Any:
    return a.slope * b.slope, a.slope * b.offset + a.offset


RECORDS = {"mixed": (mixed, Mixed), "stacked": (stacked, Stacked), "kept": (kept, Kept)}


def kernel(op: ReduceOp, dtype: Any) -> Any:
    return KERNEL(kernel_address(op.pairwise.name, element_of(np.dtype(dtype))))


def placed(x: Any, offset: int) -> tuple[Any, Any]:
    """A copy at `offset` bytes past a multiple of GUARD, and all memory around the copy."""
    room = np.full(x.nbytes + 3 * GUARD + offset, 0xA5, np.uint8)
    start = GUARD + -room.ctypes.data % GUARD + offset
    view = room[start : start + x.nbytes].view(x.dtype)
    view[...] = x
    return view, room


def combined(op: ReduceOp, x: Any, y: Any, into: str, offset: int) -> Any:
    """x op y by the kernel, into an operand or elsewhere; nothing around the arrays changes."""
    places = {"a": placed(x, offset), "b": placed(y, offset // 3), "apart": placed(x, 2 * offset)}
    a, b, out = (places[name][0] for name in ("a", "b", into))
    kernel(op, x.dtype)(out.ctypes.data, a.ctypes.data, b.ctypes.data, x.nbytes)
    for view, room in places.values():
        low = view.ctypes.data - room.ctypes.data
        assert (room[:low] == 0xA5).all()
        assert (room[low + x.nbytes :] == 0xA5).all()
    return out.copy()


def filled(dtype: np.dtype[Any], count: int, seed: int) -> Any:
    chance, found = np.random.default_rng(seed), np.zeros(count, dtype)
    for name in dtype.names or ():
        found[name] = chance.integers(0, 50, found[name].shape)
    return found


PLACES = st.sampled_from(["a", "b", "apart"])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(RECORDS)), st.integers(0, 70), PLACES, st.integers(0, 9))
def test_records_are_combined_as_python_combines_them(
    name: str, count: int, into: str, offset: int
) -> None:
    op, dtype = RECORDS[name]
    x, y = filled(dtype, count, 1), filled(dtype, count, 2)
    want = reference.pairwise(x, y, op.pairwise)
    assert reference.same_bits(combined(op, x, y, into, offset), want)


@pytest.mark.parametrize("dtype", SIGNED, ids=lambda dtype: dtype.label)
def test_numbers_are_rounded_once(dtype: DType) -> None:
    @nc10d.reduction(dtype.numpy)
    def minus(a: Any, b: Any) -> Any:
        return a - b

    x, y = mixed_values(dtype, (67,), 1), mixed_values(dtype, (67,), 2)
    with np.errstate(all="ignore"):
        want = reference.pairwise(x, y, minus.pairwise)
    assert reference.same_bits(combined(minus, x, y, "a", dtype.itemsize), want)


def test_a_truth_value_is_a_byte_that_may_hold_anything() -> None:
    @nc10d.reduction("?")
    def either(a: Any, b: Any) -> Any:
        return a or b

    x = np.array([0, 2, 0, 255], np.uint8).view("?")
    y = np.array([0, 0, 3, 1], np.uint8).view("?")
    assert combined(either, x, y, "a", 0).view(np.uint8).tolist() == [0, 1, 1, 1]


def test_bytes_of_no_field_are_those_of_the_first_operand() -> None:
    layout: Any = {"names": ["x"], "formats": ["i4"], "offsets": [2], "itemsize": 9}

    @nc10d.reduction(np.dtype(layout))
    def plus(a: Any, b: Any) -> Any:
        return (a.x + b.x,)

    x, y = np.full((2, 9), [[1], [2]], np.uint8)
    kernel(plus, layout)(y.ctypes.data, x.ctypes.data, y.ctypes.data, 9)
    assert y.tolist() == [1, 1, 3, 3, 3, 3, 1, 1, 1]


def assembly(op: ReduceOp, dtype: Any) -> str:
    assert op.pairwise.own is not None
    made = own_kernel("own_for_its_assembly", op.pairwise.own, "step", element_of(np.dtype(dtype)))
    return str(made._library.get_asm_str())


def test_no_product_is_contracted_with_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load_overload", "save_overload"):  # cached code can't be inspected
        monkeypatch.setattr(cache.CodeFile, name, lambda *_: None)
    found = assembly(composed, Line)
    assert re.search(r"mul[sp]d|fmul", found)
    assert not re.search(r"vfm\w+|fmadd|fmla", found)


HELPER = np.float32(0.25)


def scaled(x: Any) -> Any:
    return x * HELPER


def test_a_function_may_call_others_and_read_constants() -> None:
    power = np.float32(3)

    @nc10d.reduction("f4", map=scaled)
    def weighted(a: Any, b: Any) -> Any:
        return scaled(a) + b * power

    assert combined(weighted, *np.ones((2, 5), "f4"), "a", 0).tolist() == [3.25] * 5


def test_equal_functions_made_again_have_one_kernel() -> None:
    known = reduce._kernels, reduce._addresses, cache._compiled
    sizes = []
    for _ in range(100):

        @nc10d.reduction("f4")
        def again(a: Any, b: Any) -> Any:
            return a + b * np.float32(0.25)

        kernel(again, np.float32)
        sizes.append([*map(len, known)])
        del again
    assert sizes[0] == sizes[-1]


def test_arrays_of_another_shape_are_another_type() -> None:
    flat = element_of(np.dtype([("m", "f4", (4,))]))
    square = element_of(np.dtype([("m", "f4", (2, 2))]))
    assert flat is not square
    assert (flat.code, flat.label) != (square.code, square.label)
    assert square.numpy["m"].shape == (2, 2)


# What is refused


def allocates(a: Any, b: Any) -> Any:
    found = [a, b]
    return found[0]


def raises(a: Any, b: Any) -> Any:
    if b > a:
        raise ValueError
    return a


def looks_outside(a: Any, b: Any) -> Any:
    pair = (a, b)
    return pair[b]


def prints(a: Any, b: Any) -> Any:
    print(a)
    return b


def by_a_helper(a: Any, b: Any) -> Any:
    return allocates(a, b)


def writes_to_b(a: Any, b: Any, out: Any) -> None:
    b.m[0] += a.m[0]
    out.m[0] = b.m[0]


def test_an_argument_but_the_last_is_read_only() -> None:
    with pytest.raises(TypeError, match="it writes to an argument that is not its last"):
        nc10d.reduction([("m", "f8", (2,))])(writes_to_b)


def changed(a: Any, b: Any) -> Any:
    a.m[0] += b.m[0]
    return a


def test_an_argument_that_is_returned_is_a_copy() -> None:
    op = nc10d.reduction([("m", "f8", (2,))])(changed)
    x, y = np.ones((2, 3), [("m", "f8", (2,))])
    out = combined(op, x, y, "apart", 0)
    assert out["m"].tolist() == [[2, 1]] * 3
    assert x["m"].tolist() == [[1, 1]] * 3


Narrow = np.dtype(
    [("key", "u1"), ("half", "f2", (3,)), ("brain", ml_dtypes.bfloat16, (2, 2)), ("on", "?", (3,))]
)


@nc10d.reduction(Narrow)
def narrow(a: Any, b: Any, out: Any) -> None:
    out.half[1] = a.half[0] * b.half[1] + b.half[2]
    out.brain[1, 0] = a.brain[0, 1] / (b.brain[1, 1] + 1)
    out.on[0], out.on[1] = a.on[2] & b.on[1], 7


@nc10d.reduction(Narrow)
def chosen(a: Any, b: Any) -> Any:
    return a if a.half[0] < b.half[0] else b


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([narrow, chosen]), st.integers(0, 20), PLACES, st.integers(0, 9))
def test_narrow_types_in_an_array_are_computed_in_wider_ones(
    op: ReduceOp, count: int, into: str, offset: int
) -> None:
    x, y = filled(Narrow, count, 1), filled(Narrow, count, 2)
    want = reference.pairwise(x, y, op.pairwise)
    assert reference.same_bits(combined(op, x, y, into, offset), want)
    if op is narrow:
        assert want["on"][:, 1].all()


def unknown(a: Any, b: Any) -> Any:
    return a.missing + b


def text(a: Any, b: Any) -> Any:
    return "text"


def three(a: Any, b: Any, c: Any, d: Any) -> Any:
    return a


def quotient(a: Any, b: Any) -> Any:
    return a / b


def undefined(a: Any, b: Any) -> Any:
    total = a + b
    return total + nowhere  # type: ignore[name-defined]  # noqa: F821


def without_else(a: Any, b: Any) -> Any:  # noqa: RET503
    if b > a:
        return b


def returns_nothing(a: Any, b: Any) -> Any:
    a + b


def raises_a_value(a: Any, b: Any) -> Any:
    if b > a:
        raise ValueError("greater", b)
    return a


def slices(a: Any, b: Any, out: Any) -> None:
    out.m[:] = b.m


def adds_arrays(a: Any, b: Any, out: Any) -> None:
    out.m = a.m + b.m


def raises_for_a_record(a: Any, b: Any, out: Any) -> None:
    if b.m[0] > 1:
        raise ValueError


async def asynchronous(a: Any, b: Any) -> Any:
    return a


def generates(a: Any, b: Any) -> Any:
    yield a


Pair = np.dtype([("m", "f8", (2,))])
REFUSED: list[Any] = [
    (allocates, "allocates memory", "found = [a, b]"),
    (raises, "may raise an error", "raise ValueError"),
    (looks_outside, "may raise an error", "return pair[b]"),
    (prints, "calls the interpreter", "print(a)"),
    (by_a_helper, "allocates memory", ""),
    (unknown, "missing", "return a.missing + b"),
    (text, "must return a number for int32", "def text(a: Any, b: Any) -> Any:"),
    (three, "must have 2 parameters", "def three("),
    (quotient, "must return a number for int32, not float64", "def quotient("),
    (undefined, "name 'nowhere' is not defined", "return total + nowhere"),
    (without_else, "a branch returns nothing", "def without_else("),
    (returns_nothing, "must return a number for int32, not none", "def returns_nothing("),
    (raises_a_value, "may raise an error", 'raise ValueError("greater", b)'),
    (slices, "record write a loop over their elements", "out.m[:] = b.m", Pair),
    (adds_arrays, "record write a loop over their elements", "def adds_arrays(", Pair),
    (raises_for_a_record, "may raise an error\n", "raise ValueError", Pair),
    (asynchronous, "without async def and yield", "async def asynchronous("),
    (generates, "without async def and yield", "def generates("),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0].__name__)
def test_a_refusal_says_why_and_quotes_the_line(case: Any) -> None:
    function, why, line, *dtype = case
    with pytest.raises(TypeError) as caught:
        nc10d.reduction(*dtype or ["i4"])(function)
    message = str(caught.value)
    assert message.startswith(f"{function.__name__} can't be a reduction: "), message
    assert why in message, message
    assert re.search(r"test_own_reduce\.py, line \d+: " + re.escape(line), message), message


def test_a_line_that_cannot_be_read_is_not_quoted() -> None:
    names: dict[str, Any] = {}
    exec("def first(a, b):\n    return [a, b][0]", names)
    with pytest.raises(TypeError, match=r"it allocates memory\n  <string>, line 2$"):
        nc10d.reduction("i4")(names["first"])


def test_names_of_fields_may_begin_with_an_underscore() -> None:
    dtype = np.dtype([("_x", "f4"), ("_y", "i4")])
    op = nc10d.reduction(dtype)(lambda a, b: (a._x + b._x, a._y - b._y))
    assert combined(op, *np.ones((2, 1), dtype), "a", 0).tolist() == [(2.0, 0)]


def test_what_ranks_cannot_compare_is_refused() -> None:
    secret = object()
    with pytest.raises(TypeError, match="reads secret, a object, which ranks can't compare"):
        nc10d.reduction("i4")(lambda a, b: a if secret else b)
    with pytest.raises(TypeError, match="a reduction is a Python function, got <built-in"):
        nc10d.reduction("i4")(max)


def writes_a_global(a: Any, b: Any) -> Any:
    global pair
    pair = a
    return b


def imports(a: Any, b: Any) -> Any:
    import math

    return math.sqrt(a)


def counter() -> Any:
    count = 0.0

    def counts(a: Any, b: Any) -> Any:
        nonlocal count
        count = b
        return a + count

    return counts


TABLE = np.ones(125_001)
HUGE = 2**66
UNFIT: list[tuple[Any, str]] = [
    (writes_a_global, "writes_a_global writes to pair, which is frozen"),
    (counter(), "counts writes to count, which is frozen"),
    (imports, "imports imports math: import it outside"),
    (lambda a, b: a + TABLE[2], "reads TABLE, an array of more than 1000000 bytes"),
    (lambda a, b: a / 2**70, "an int of more than 64 bits"),
    (lambda a, b: a / 18446744073709551616, "an int of more than 64 bits"),
    (lambda a, b: a * HUGE, "an int of more than 64 bits"),
]


@pytest.mark.parametrize(("function", "text"), UNFIT)
def test_what_a_compiled_function_would_do_otherwise_is_refused(function: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        nc10d.reduction("f8")(function)


def test_a_record_has_at_most_520_bytes() -> None:
    with pytest.raises(TypeError, match="at most 520 bytes, not 528"):
        nc10d.reduction([("x", "f8", (66,))])(lambda a, b: a)
    nc10d.reduction([("x", "f8", (65,))])(lambda a, b: a)


PROGRAM = """
import nc10d, numba.core.compiler as compiler, sys
__name__ = sys.argv[1]  # another module, which the other program lacks
if __name__ == "again":
    compiler.compile_extra = None  # whoever compiles fails
@nc10d.reduction([("x", "f8"), ("y", "f4", (3,))], map=lambda a, out: None)
def merged(a, b, out):
    out.x = a.x * b.x
"""


def test_a_kernel_is_compiled_once_and_then_loaded(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    for turn in ("first", "again"):
        subprocess.run(
            [sys.executable, "-c", PROGRAM, turn],
            check=True,
            env={"NC10D_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"},
            cwd=Path(nc10d.__file__).parent.parent,
        )
