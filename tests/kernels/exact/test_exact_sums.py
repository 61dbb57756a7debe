"""Exact sums by the kernels: against fractions, at the borders of blocks, levels and ranges."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.arrays.dtypes import DType
from nc10d.kernels.exact.exact_sums import (
    COUNTS,
    LAYOUTS,
    LIMB,
    SumLayout,
    compiled_kernel,
    exact_kernel,
)

BLOCK = 2048
WIDE = DType.FLOAT32, DType.FLOAT64
SPREADS = {DType.FLOAT64: (0, 20, 70, 150, 1070), DType.FLOAT32: (0, 20, 70, 140)}
GOLDEN = {
    "exact_sum_float32": "7521e881201750c9",
    "exact_dot_float32": "90fbcf082f7d60c5",
    "exact_sum_float64": "902c5ad2850631fe",
    "exact_dot_float64": "6919e20a8b3aec64",
}
"""Digests of the exact sums, by kernel."""


def layout_of(dtype: DType, products: bool = False) -> SumLayout:
    return LAYOUTS[dtype, products]


def words_of(layout: SumLayout, x: Any, y: Any = None, words: Any = None) -> Any:
    """Return the words after the kernel has added the elements, or products."""
    if words is None:
        words = np.zeros(layout.limbs + COUNTS, np.int64)
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(x if y is None else y)
    exact_kernel(layout)(words.ctypes.data, x.ctypes.data, y.ctypes.data, x.size)
    return words


def value_of(layout: SumLayout, words: Any) -> Fraction:
    """Return what the words stand for."""
    units = sum(int(limb) << LIMB * place for place, limb in enumerate(words[:-COUNTS]))
    return Fraction(units) * Fraction(2) ** layout.lowest


def fractions(x: Any) -> list[Fraction]:
    return [Fraction(float(value)) for value in x]


def check(x: Any, y: Any = None, dtype: DType | None = None) -> None:
    """Compare a kernel's sum, or that of products, with the fractions'."""
    layout = layout_of(dtype or DType[x.dtype.name.upper()], y is not None)
    words = words_of(layout, x, y)
    others = [Fraction(1)] * len(x) if y is None else fractions(y)
    expected = sum((a * b for a, b in zip(fractions(x), others, strict=True)), Fraction(0))
    assert value_of(layout, words) == expected
    assert words[-COUNTS:].tolist() == [0, 0, 0, len(x)]


def raw(count: int, seed: int = 1) -> Any:
    """Return random words, the same with every version of NumPy."""
    return np.random.PCG64(seed).random_raw(count)


def scattered(dtype: DType, count: int, spread: int, seed: int = 1) -> Any:
    """Return floats with random bits, whose exponents lie at most `spread` from 0's."""
    words = raw(2 * count, seed)
    significands = 1 + (words[:count] >> np.uint64(12)).astype(np.float64) * 2.0**-52
    exponents = (words[count:] % np.uint64(2 * spread + 1)).astype(np.int64) - spread
    exponents = np.minimum(exponents, 120 if dtype is DType.FLOAT32 else 1020)
    signs = np.where(words[:count] & np.uint64(1), 1.0, -1.0)
    return (signs * np.ldexp(significands, exponents)).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13])
def test_sums_are_exact_for_every_range_and_length(dtype: DType, count: int) -> None:
    for spread in SPREADS[dtype]:
        x, y = (scattered(dtype, count, spread, seed) for seed in (1, 2))
        check(x)
        check(x, y)
        check(np.concatenate([x, -x[::-1]]))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3FN])
def test_narrow_floats_are_summed_exactly(dtype: DType) -> None:
    kind = np.uint8 if dtype.itemsize == 1 else np.uint16
    every = np.arange(1 << 8 * dtype.itemsize).astype(kind).view(dtype.numpy)
    x = every[np.isfinite(every.astype(np.float32))]
    check(x, dtype=dtype)
    check(x, x[::-1].copy(), dtype=dtype)


LARGEST = {dtype: np.finfo(dtype.numpy).max for dtype in WIDE}
LEAST = {dtype: np.finfo(dtype.numpy).smallest_subnormal for dtype in WIDE}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_block_of_equal_elements_fits_the_accumulators(dtype: DType, sign: int) -> None:
    """The most that a lane has to hold, at every level, and halves of its last places."""
    digits = np.finfo(dtype.numpy).nmant
    for exponent in (-1000, -140, 0, 100, 127, 1012, 1013, 1023):
        with np.errstate(all="ignore"):
            size = np.ldexp(2 - 2.0**-digits, exponent).astype(dtype.numpy)
        if not np.isfinite(size):
            continue
        x = np.full(BLOCK, sign * size)
        check(x)
        check(x, np.full_like(x, 1 - 2.0 ** -(digits + 1)))
        for below in (*range(40, 48), *range(83, 91)):
            part = size * dtype.numpy.type(2.0**-below)
            x[1:] = -part
            check(x)
            x[BLOCK // 2 :] = part
            check(x)


@pytest.mark.parametrize("dtype", WIDE)
def test_the_ends_of_the_range_are_exact(dtype: DType) -> None:
    for x in (
        [LARGEST[dtype]] * 3000,
        [LEAST[dtype]] * 3000,
        [LARGEST[dtype], LEAST[dtype]] * 1500,
    ):
        array = np.array(x, dtype.numpy)
        check(array)
        check(array, array)
        check(array, array[::-1].copy())
        check(np.concatenate([array, -array, array[:1]]))


def test_products_are_exact_where_halves_overflow_or_rests_underflow() -> None:
    """Near 2**996, the splitting's limit; around _LEAST_PRODUCT; with zeros among them."""
    x, y = scattered(DType.FLOAT64, BLOCK, 3, 1), scattered(DType.FLOAT64, BLOCK, 3, 2)
    for one, other in [(995, -995), (1019, -1019), (-480, -480), (-500, -480), (-1000, -60)]:
        a, b = np.ldexp(x, one), np.ldexp(y, other)
        check(a, b)
        a[::3] = 0.0
        check(a, b)
    check(np.ldexp(x, -600), np.ldexp(y, -600))
    check(np.append(x, 2.0**1000), np.append(y, 2.0**1000))


@pytest.mark.parametrize("dtype", WIDE)
def test_special_elements_are_counted_and_change_no_limb(dtype: DType) -> None:
    inf, nan = np.inf, np.nan
    x = scattered(dtype, BLOCK + 21, 5)
    layout, finite = layout_of(dtype), words_of(layout_of(dtype), x)
    for place in (0, 17, BLOCK, BLOCK + 20):
        for special, counts in [(nan, [1, 0, 0]), (inf, [0, 1, 0]), (-inf, [0, 0, 1])]:
            words = words_of(layout, np.insert(x, place, special).astype(dtype.numpy))
            assert words[-COUNTS:-1].tolist() == counts
            assert words[:-COUNTS].tolist() == finite[:-COUNTS].tolist()
    products = layout_of(dtype, True)
    a = np.array([inf, inf, -inf, nan, 0.0], dtype.numpy)
    b = np.array([0.0, 2.0, 3.0, 1.0, 5.0], dtype.numpy)
    assert words_of(products, a, b)[-COUNTS:].tolist() == [2, 1, 1, 5]


def finite(dtype: DType) -> st.SearchStrategy[list[float]]:
    """Return lists that have what cancels: values, their negatives, neighbours, ends of ranges."""
    width = 8 * dtype.itemsize
    value = st.floats(width=width, allow_nan=False, allow_infinity=False)  # type: ignore[arg-type]
    pair = value.map(lambda x: [x, -x])
    ends = st.sampled_from(
        [[float(LARGEST[dtype])], [-float(LARGEST[dtype])], [float(LEAST[dtype])]]
    )
    return st.lists(st.one_of(value.map(lambda x: [x]), pair, ends), max_size=40).map(
        lambda parts: [x for part in parts for x in part]
    )


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(WIDE), st.sampled_from([1, 1, 97]), st.booleans())
def test_any_partition_and_order_gives_the_same_sum(
    data: st.DataObject, dtype: DType, times: int, products: bool
) -> None:
    x = np.array(data.draw(finite(dtype)) * times, dtype.numpy)
    y = np.roll(x, 1) if products else x
    layout, whole = layout_of(dtype, products), Fraction(0)
    terms = zip(fractions(x), fractions(y) if products else [Fraction(1)] * len(x), strict=True)
    whole = sum((a * b for a, b in terms), Fraction(0))
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(len(x))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=4)))
    parts = np.split(order, cuts)
    words = sum(words_of(layout, x[part], y[part]) for part in parts)
    assert value_of(layout, words) == whole
    again: Any = None
    for part in parts:
        again = words_of(layout, x[part], y[part], again)
    assert value_of(layout, again) == whole


def digest(dtype: DType, products: bool) -> str:
    """Return a digest of the exact sums of fixed inputs."""
    total = hashlib.sha256()
    layout = layout_of(dtype, products)
    for spread in SPREADS[dtype]:
        x, y = (scattered(dtype, 3 * BLOCK + 5, spread, seed) for seed in (3, 4))
        total.update(str(value_of(layout, words_of(layout, x, y))).encode())
    return total.hexdigest()[:16]


def contractions(assembly: str) -> list[str]:
    """Return the fused multiply-adds in a kernel, by x86's names and by Arm's."""
    return re.findall(r"\b(?:vfn?m(?:add|sub)\w*|fn?m(?:add|sub|la|ls)|fml[as]l?)\b", assembly)


def test_fused_instructions_are_found_by_name() -> None:
    assert len(contractions("vfmadd213pd %ymm0\nvfnmsub231sd x\nfmla v0.2d\nfmsub d0\nvmulpd")) == 4


def compile_and_print() -> None:
    """Compile without the cache of the machine; print digests, and instructions of FMA."""
    for (dtype, products), layout in LAYOUTS.items():
        if dtype in WIDE:
            (assembly,) = compiled_kernel(layout).inspect_asm().values()
            assert "mul" in assembly
            print(layout.name, len(contractions(assembly)), "ymm" in assembly)
            print(layout.name, digest(dtype, products))


NARROW_CPU = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


@pytest.mark.parametrize("cpu", [{}, NARROW_CPU], ids=["host", "generic"])
def test_no_cpu_fuses_and_all_give_the_golden_sums(cpu: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import test_exact_sums as t; t.compile_and_print()"],
        cwd=Path(__file__).parent,
        env={**os.environ, **cpu, "NC10D_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0]: line[1] for line in lines if len(line) == 2} == GOLDEN
    assert all(line[1] == "0" for line in lines if len(line) == 3)
    if cpu and platform.machine() == "x86_64":
        assert not [line for line in lines if line[-1] == "True"], "registers of 32 bytes"
