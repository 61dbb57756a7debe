"""nc10d.exact: the rounded exact result, for any partition, order and number of ranks."""

from __future__ import annotations

import math
import platform
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numba import types
from on_ranks import on_ranks

import nc10d as dist
from nc10d import exact
from nc10d.group.process_group import ProcessGroup
from nc10d.kernels.cache import compiled, entry_point
from nc10d.kernels.simd import I8, Builder, Value, emits
from nc10d.testing import run_ranks

TINY, HUGE = 2.0**-1074, 1.7976931348623157e308


def bits(x: float) -> bytes:
    assert type(x) is float
    return struct.pack("<d", x)


def rounded(value: Fraction) -> float:
    """Return the nearest float; infinite if there is none."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def root(value: Fraction) -> float:
    with localcontext() as context:
        context.prec = 400
        context.Emax, context.Emin = 9999, -9999
        found = (Decimal(value.numerator) / Decimal(value.denominator)).sqrt()
        return rounded(Fraction(found))


def oracle(x: Any, y: Any) -> list[float]:
    """Return sum, mean, dot and norm of finite floats, by fractions."""
    a, b = ([Fraction(float(value)) for value in each] for each in (x, y))
    total, none = sum(a, Fraction(0)), Fraction(0)
    mean = rounded(total / len(a)) if a else math.nan
    dot = sum((p * q for p, q in zip(a, b, strict=True)), none)
    return [rounded(total), mean, rounded(dot), root(sum((p * p for p in a), none))]


def results(x: Any, y: Any) -> list[bytes]:
    found = exact.sum(x), exact.mean(x), exact.dot(x, y), exact.norm(x)
    return [bits(each) for each in found]


def fixed(dtype: Any) -> tuple[Any, Any]:
    """Return fixed arrays whose sums cancel, with exponents up to 20 (60 if there is room)."""
    words = np.random.PCG64(7).random_raw(6000)
    spread = 60 if np.dtype(dtype).itemsize > 2 else 7
    exponents = (words % np.uint64(2 * spread + 1)).astype(np.int64) - spread
    values = np.ldexp((words >> np.uint64(11)).astype(np.float64) * 2.0**-53, exponents)
    x, y = values[:3000].astype(dtype), values[3000:].astype(dtype)
    return np.concatenate([x, -x[:-7]]), np.concatenate([y, y[7:]])


GOLDEN = {
    "float64": "0x1.420db572f3930p+58 0x1.b8395ac9cfd4fp+45 "
    "0x1.d5eda03c23b6cp+114 0x1.08b9fcaaad55ap+62",
    "float32": "0x1.420db5c6c0000p+58 0x1.b8395b3c5bc15p+45 "
    "0x1.d5ed9de16524ap+114 0x1.08b9fc8cedca6p+62",
    "float16": "0x1.21ab644000000p+5 0x1.8bf516573a232p-8 "
    "-0x1.dbb41a288484dp+13 0x1.a454c082ae9efp+10",
    "bfloat16": "0x1.215bb00000000p+5 0x1.8b882332ca385p-8 "
    "-0x1.da34ae53754d8p+13 0x1.a44dfe9435c55p+10",
}
"""Sum, mean, dot and norm of the fixed arrays."""
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in GOLDEN}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bits(name: str) -> None:
    x, y = fixed(DTYPES[name])
    golden = [float.fromhex(text) for text in GOLDEN[name].split()]
    assert golden == oracle(x, y)
    (found,) = run_ranks(lambda _: results(x, y), 1)
    assert found == [bits(value) for value in golden]


@on_ranks(1, 2, 3, 4)
def test_every_number_of_ranks_and_partition_gives_the_same_bits(world: ProcessGroup) -> None:
    for name, dtype in DTYPES.items():
        x, y = fixed(dtype)
        golden = [bits(float.fromhex(text)) for text in GOLDEN[name].split()]
        order = np.random.default_rng(world.size).permutation(x.size)
        uneven = [0, *(x.size * (k * k) // world.size**2 for k in range(1, world.size + 1))]
        mine = order[uneven[world.rank] : uneven[world.rank + 1]]
        assert results(x[mine], y[mine]) == golden
        assert results(x[world.rank :: world.size], y[world.rank :: world.size]) == golden
        last = x if world.rank == world.size - 1 else x[:0]
        assert bits(exact.sum(last)) == golden[0], "the others have nothing"


FINITE = st.floats(allow_nan=False, allow_infinity=False)
PARTS = st.one_of(
    FINITE.map(lambda x: [x]),
    FINITE.map(lambda x: [x, -x]),
    st.sampled_from(
        [[HUGE, HUGE, -HUGE], [TINY], [-TINY], [1e308], [-1e308], [-0.0], [1.0, 2.0**-53]]
    ),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(PARTS, max_size=20), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_floats_in_any_order(parts: list[list[float]], size: int, random: Any) -> None:
    values = [value for part in parts for value in part]
    x, expected = np.array(values), [bits(value) for value in oracle(values, values[::-1])]
    pairs = list(zip(values, values[::-1], strict=True))
    random.shuffle(pairs)

    def body(group: ProcessGroup) -> list[bytes]:
        mine = np.array(pairs[group.rank :: group.size]).reshape(-1, 2)
        return results(mine[:, 0], mine[:, 1])

    assert x.size == len(pairs)
    assert run_ranks(body, size) == [expected] * size


INF, NAN = math.inf, math.nan
SPECIAL: list[tuple[Callable[..., float], list[list[float]], float]] = [
    (exact.sum, [[1e308, 1e308, -1e308]], 1e308),
    (exact.sum, [[1e308, 1e308]], INF),
    (exact.sum, [[-HUGE, -HUGE]], -INF),
    (exact.sum, [[HUGE, 2.0**969]], HUGE),  # below the half to 2**1024
    (exact.sum, [[HUGE, 2.0**970]], INF),  # the half
    (exact.sum, [[INF, 1.0]], INF),
    (exact.sum, [[-INF, HUGE, HUGE]], -INF),
    (exact.sum, [[INF, -INF]], NAN),
    (exact.sum, [[NAN, INF]], NAN),
    (exact.sum, [[-NAN]], NAN),
    (exact.sum, [[-0.0, -0.0]], 0.0),
    (exact.sum, [[]], 0.0),
    (exact.sum, [[TINY, -TINY]], 0.0),
    (exact.sum, [[2.0**-1022, -TINY]], 2.0**-1022 - TINY),
    (exact.sum, [[1.0, 2.0**-53]], 1.0),
    (exact.sum, [[1.0, 2.0**-53, TINY]], 1.0 + 2.0**-52),
    (exact.mean, [[1e308, 1e308]], 1e308),
    (exact.mean, [[TINY, TINY]], TINY),
    (exact.mean, [[-TINY, 0.0]], -0.0),
    (exact.mean, [[]], NAN),
    (exact.dot, [[1e308, 1e308], [1e308, -1e308]], 0.0),
    (exact.dot, [[1e200, 1.0], [1e200, 1.0]], INF),
    (exact.dot, [[-TINY], [TINY]], -0.0),
    (exact.dot, [[-0.0], [1.0]], 0.0),
    (exact.dot, [[TINY] * 2, [0.25] * 2], 0.0),
    (exact.dot, [[TINY] * 3, [0.25] * 3], TINY),
    (exact.dot, [[INF], [0.0]], NAN),
    (exact.dot, [[-INF, HUGE], [2.0, HUGE]], -INF),
    (exact.dot, [[], []], 0.0),
    (exact.norm, [[3 * 2.0**666, 4 * 2.0**666]], 5 * 2.0**666),
    (exact.norm, [[3 * TINY, 4 * TINY]], 5 * TINY),
    (exact.norm, [[1.0, 2.0**-26, 2.0**-53]], 1.0),  # 1 + 2**-53, a tie
    (exact.norm, [[1.0, 2.0**-26, 2.0**-53, TINY]], 1.0 + 2.0**-52),
    (exact.norm, [[HUGE, HUGE]], INF),
    (exact.norm, [[-INF, 1.0]], INF),
    (exact.norm, [[NAN, INF]], NAN),
    (exact.norm, [[-0.0]], 0.0),
    (exact.norm, [[]], 0.0),
]


@on_ranks(1, 2)
def test_special_values(world: ProcessGroup) -> None:
    for call, arrays, expected in SPECIAL:
        mine = [np.array(x[world.rank :: world.size], np.float64) for x in arrays]
        assert bits(call(*mine)) == bits(expected), (call.__name__, arrays)


@on_ranks(1)
def test_roots_of_small_sums_are_rounded_once(world: ProcessGroup) -> None:
    for tiny in (np.float32(2.0**-149), np.float64(TINY), np.float64(2.0**-1023 + TINY)):
        for count in range(1, 40):
            expected = root(count * Fraction(float(tiny)) ** 2)
            assert exact.norm(np.full(count, tiny)) == expected, (tiny, count)


@on_ranks(2)
def test_arrays_of_any_strides_and_shape(world: ProcessGroup) -> None:
    whole = np.arange(120.0).reshape(4, 5, 6) ** 3 + 0.1
    views = [whole, whole.T, whole[::-2, :, 1::2], whole[1, 2, 3:4], whole[0, 0, 0].reshape(())]
    for dtype in DTYPES.values():
        with np.errstate(over="ignore"):
            cubes = [np.asarray(np.minimum(view, 60000)).astype(dtype, order="K") for view in views]
        for view in cubes:
            a = view.astype(np.float64).ravel().tolist()
            assert exact.sum(view) == math.fsum(2 * a)
            assert exact.dot(view, view[...]) == rounded(
                2 * sum((Fraction(v) ** 2 for v in a), Fraction(0))
            )
    assert exact.sum(np.ones(2 + world.rank)) == 5.0, "shapes differ between ranks"
    assert exact.sum(np.ones(3)[: world.rank * 2]) == 2.0


@on_ranks(2)
def test_a_group_is_named_as_in_functional_calls(world: ProcessGroup) -> None:
    own = dist.new_group([world.rank], use_local_synchronization=True)
    assert isinstance(own, ProcessGroup)
    x = np.full(3, 1.0 + world.rank)
    assert exact.sum(x, own) == 3.0 * (1 + world.rank)
    assert exact.mean(x, [0, 1]) == 1.5


@on_ranks(2)
def test_other_calls_are_a_mismatch(world: ProcessGroup) -> None:
    call = exact.sum if world.rank else exact.mean
    with pytest.raises(dist.CollectiveMismatch, match=r"SUM for exact\.mean of float32"):
        call(np.ones(3, np.float32))


class OnDevice:
    """An array whose memory is on a device."""

    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": (4,), "typestr": "<f4", "data": (1 << 40, False), "version": 3
    }  # fmt: skip


@on_ranks(1)
def test_mistakes_are_told_before_anything_is_sent(world: ProcessGroup) -> None:
    floats = np.ones(4)
    for wrong in (np.ones(4, np.int32), np.ones(4, bool), np.ones(4, np.complex64)):
        with pytest.raises(
            TypeError, match=r"exact\.sum is for floats, not (int32|bool|complex64)"
        ):
            exact.sum(wrong)
    with pytest.raises(TypeError, match=r"exact\.norm is for host arrays: copy this from cuda"):
        exact.norm(OnDevice())
    with pytest.raises(TypeError, match="expected an array"):
        exact.sum([1.0, 2.0])
    with pytest.raises(ValueError, match=r"shapes differ: \(4,\) and \(2, 2\)"):
        exact.dot(floats, floats.reshape(2, 2))
    with pytest.raises(TypeError, match="dtypes differ: float64, float32"):
        exact.dot(floats, floats.astype(np.float32))
    with dist.coalescing_manager(), pytest.raises(ValueError, match=r"exact\.sum is not possible"):
        exact.sum(floats)
    assert exact.sum(floats) == 4.0


def test_without_a_group_a_call_says_so() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        exact.sum(np.ones(3))


def control_register(name: str) -> Any:
    """Return the function of an address that stores or loads MXCSR there."""

    @emits(types.void(types.int64))
    def access(b: Builder, address: Value) -> None:
        pointer = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer])
        b.call(
            b.module.declare_intrinsic(f"llvm.x86.sse.{name}", (), kind),
            [b.inttoptr(address, pointer)],
        )

    def run(address):  # type: ignore[no-untyped-def]
        access(address)

    run.__qualname__ = f"test_exact_{name}"
    return entry_point(compiled("void(int64)")(run))


@contextmanager
def with_mxcsr(flags: int) -> Iterator[None]:
    """Set flags in this thread's MXCSR for the block."""
    register = np.zeros(1, np.uint32)
    read, write = control_register("stmxcsr"), control_register("ldmxcsr")
    read(register.ctypes.data)
    before = int(register[0])
    register[0] = before | flags
    write(register.ctypes.data)
    try:
        yield
    finally:
        register[0] = before
        write(register.ctypes.data)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="MXCSR is x86's")
@pytest.mark.parametrize("flag", [1 << 15, 1 << 6], ids=["FTZ", "DAZ"])
def test_a_thread_that_flushes_subnormals_is_refused(flag: int) -> None:
    def body(_group: ProcessGroup) -> float:
        with with_mxcsr(flag), pytest.raises(FloatingPointError, match="set_flush_denormal"):
            exact.sum(np.ones(3))
        return exact.sum(np.ones(3))

    assert run_ranks(body, 1) == [3.0]
