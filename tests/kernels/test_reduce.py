"""Every kernel against the oracle: sizes, aliasing, alignment, special values, machine code."""

import json
import os
import platform
import re
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.kernels import loops, reduce
from nc10d.kernels.streaming import SCALED, stream_divide_address
from nc10d.ops.reductions import PAIRWISE
from nc10d.testing import reference
from nc10d.testing.strategies import mixed_values as values
from nc10d.testing.strategies import special_values

from .calling import DTYPES, KERNEL, PAIRS, Memory, allowed

SIZES = [*range(71), 127, 128, 129, 255, 257, 1000, 4099]
NARROW = [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2]
FORMS = ["apart", "dst is a", "dst is b", "a is b", "all one"]


def ids(pair):
    return "-".join(part.label if isinstance(part, DType) else part for part in pair)


def call(step, dtype, a, b, form="apart", offsets=(0, 0, 0)):
    """Run the kernel on copies placed as in `form`; return dst."""
    first, second = Memory(a, offsets[0]), Memory(b, offsets[1])
    if form in ("a is b", "all one"):
        second = first
    dst = {"dst is a": first, "dst is b": second, "all one": first}.get(form)
    dst = dst or Memory(np.zeros_like(a), offsets[2])
    kernel = KERNEL(reduce.kernel_address(step, dtype))
    kernel(dst.address, first.address, second.address, a.nbytes)
    assert first.guards_hold()
    assert second.guards_hold()
    assert dst.guards_hold()
    return dst.array()


@pytest.mark.parametrize("pair", PAIRS, ids=ids)
def test_a_kernel_computes_what_numpy_does_at_every_size_and_aliasing(pair):
    step, dtype = pair
    a, b = values(dtype, max(SIZES), 1), values(dtype, max(SIZES), 2)
    expected = {
        form: reference.pairwise(a, a if form in ("a is b", "all one") else b, PAIRWISE[step])
        for form in FORMS
    }
    for size, form in product(SIZES, FORMS):
        found = call(step, dtype, a[:size], b[:size], form)
        assert reference.same_bits(found, expected[form][:size]), (size, form)


@pytest.mark.parametrize("pair", PAIRS, ids=ids)
def test_addresses_need_no_alignment(pair):
    step, dtype = pair
    a, b = values(dtype, 300, 3), values(dtype, 300, 4)
    expected = reference.pairwise(a, b, PAIRWISE[step])
    for offsets, form in product([(1, 2, 3), (5, 0, 7), (0, 3, 1), (8, 4, 2)], FORMS[:3]):
        assert reference.same_bits(call(step, dtype, a, b, form, offsets), expected)


@pytest.mark.parametrize("pair", PAIRS, ids=ids)
def test_a_long_output_may_begin_anywhere_in_a_cache_line(pair):
    step, dtype = pair
    most = (loops.LONG + 3 * loops.LINE) // dtype.itemsize
    a, b = values(dtype, most, 3), values(dtype, most, 4)
    expected = reference.pairwise(a, b, PAIRWISE[step])
    starts = [items * dtype.itemsize % loops.LINE for items in (1, 3, 5, 16, 63)]
    for start, form, short in product(starts, FORMS[:3], (0, 1, 7)):
        offsets = {"apart": (3, 5, start), "dst is a": (start, 3, 0), "dst is b": (0, start, 0)}
        size = most - short
        found = call(step, dtype, a[:size], b[:size], form, offsets[form])
        assert reference.same_bits(found, expected[:size]), (start, form, short)


@pytest.mark.parametrize("pair", PAIRS, ids=ids)
def test_special_values_meet_each_other(pair):
    step, dtype = pair
    special = special_values(dtype)
    if dtype.family is ElementKind.COMPLEX:
        parts = special.real
        special = np.array([complex(x, y) for x, y in product(parts, parts)], dtype.numpy)
    a, b = np.repeat(special, len(special)), np.tile(special, len(special))
    assert reference.same_bits(call(step, dtype, a, b), reference.pairwise(a, b, PAIRWISE[step]))


@pytest.mark.parametrize("dtype", NARROW[2:], ids=lambda d: d.label)
@pytest.mark.parametrize("step", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_all_pairs_of_8_bit_floats_agree_with_the_oracle(dtype, step):
    every = np.arange(256, dtype=np.uint8).view(dtype.numpy)
    a, b = np.repeat(every, 256), np.tile(every, 256)
    assert reference.same_bits(call(step, dtype, a, b), reference.pairwise(a, b, PAIRWISE[step]))


@pytest.mark.parametrize("dtype", NARROW[:2], ids=lambda d: d.label)
@pytest.mark.parametrize("step", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_all_16_bit_floats_with_several_partners_agree_with_the_oracle(dtype, step):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype.numpy)
    for partner in [0x0001, 0x3C01, 0x3F81, 0x7BFF, 0x8001, 0xC2AB, 0x4248]:
        other = np.full_like(every.view(np.uint16), partner).view(dtype.numpy)
        found = call(step, dtype, every, other)
        assert reference.same_bits(found, reference.pairwise(every, other, PAIRWISE[step]))


@pytest.mark.parametrize("step", PAIRWISE)
def test_any_nonzero_byte_is_true(step):
    odd = np.array([0, 1, 2, 255, 0, 4] * 20, np.uint8)
    a, b = odd.view(bool), np.roll(odd, 1).view(bool)
    expected = reference.pairwise(odd != 0, np.roll(odd, 1) != 0, PAIRWISE[step])
    assert reference.same_bits(call(step, DType.BOOL, a, b), expected)


@pytest.mark.parametrize("step", ["MIN", "MAX"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, *NARROW], ids=lambda d: d.label)
def test_nan_propagates_from_either_side(step, dtype):
    a = np.array([np.nan, 1.0, np.nan] * 30).astype(dtype.numpy)
    b = np.array([1.0, np.nan, np.nan] * 30).astype(dtype.numpy)
    assert np.isnan(call(step, dtype, a, b).astype(np.float32)).all()


def test_a_refused_reduction_has_no_kernel():
    for step, dtype in product(PAIRWISE, DTYPES):
        if not allowed(step, dtype):
            with pytest.raises(TypeError, match=dtype.label):
                reduce.kernel_address(step, dtype)


DIVISIBLE = [d for d in DTYPES if allowed("AVG", d)]


def call_map(address, x, arg, in_place, offset):
    src = Memory(x, offset)
    dst = src if in_place else Memory(np.zeros_like(x), offset + 1)
    KERNEL(address)(dst.address, src.address, arg, x.nbytes)
    assert src.guards_hold()
    assert dst.guards_hold()
    return dst.array()


@pytest.mark.parametrize("dtype", DIVISIBLE, ids=lambda d: d.label)
def test_divide_by_the_world_size(dtype):
    x = values(dtype, 300, 5)
    for count, in_place, offset in product([1, 2, 3, 7, 200, 1000], [True, False], [0, 3]):
        expected = reference.divided(x, count)
        for size in (0, 1, 2, 5, 17, 63, 64, 65, 300):
            args = (reduce.divide_address(dtype), x[:size], count, in_place, offset)
            assert reference.same_bits(call_map(*args), expected[:size]), (count, size)


@pytest.mark.parametrize("dtype", SCALED, ids=lambda d: d.label)
def test_division_past_the_cache(dtype):
    x = values(dtype, 300, 5)
    kernel = stream_divide_address(dtype)
    for count, in_place, offset in product([1, 2, 3, 1000], [True, False], [0, 3, dtype.itemsize]):
        expected = reference.divided(x, count)
        for size in (0, 1, 2, 5, 31, 32, 33, 64, 300):
            found = call_map(kernel, x[:size], count, in_place, offset)
            assert reference.same_bits(found, expected[:size]), (count, size)


@pytest.mark.parametrize("dtype", DIVISIBLE, ids=lambda d: d.label)
def test_scale_by_a_factor(dtype):
    x = values(dtype, 300, 6)
    whole = dtype.family in (ElementKind.INT, ElementKind.UINT)
    for factor, in_place in product([0.0, 1.0, 2.0, -3.0, 1e5], [True, False]):
        value = np.array([factor if whole else factor / 7])
        expected = reference.scaled(x, float(value[0]))
        for size in (0, 1, 2, 5, 17, 63, 64, 65, 300):
            args = (reduce.scale_address(dtype), x[:size], value.ctypes.data, in_place, 3)
            assert reference.same_bits(call_map(*args), expected[:size]), (factor, size)


BOTH = [
    (step, dtype)
    for step, dtype in product(reduce.BOTH, DTYPES)
    if dtype.family in (ElementKind.FLOAT, ElementKind.COMPLEX)
]


@pytest.mark.parametrize("pair", BOTH, ids=ids)
def test_a_kernel_that_writes_to_both_operands(pair):
    step, dtype = pair
    parts = np.resize(special_values(dtype), max(SIZES))
    for x, y in [(values(dtype, max(SIZES), 7), values(dtype, max(SIZES), 8)), (parts, parts)]:
        expected = reference.pairwise(x, np.roll(y, 1), PAIRWISE["SUM"])
        if step == "AVG":
            expected = reference.divided(expected, 2)
        for size, offsets in product(SIZES, [(0, 0), (3, 5)]):
            a, b = Memory(x[:size], offsets[0]), Memory(np.roll(y, 1)[:size], offsets[1])
            KERNEL(reduce.both_address(step, dtype))(
                a.address, a.address, b.address, x[:size].nbytes
            )
            for memory in (a, b):
                assert memory.guards_hold()
                assert reference.same_bits(memory.array(), expected[:size]), (size, offsets)


PACKED = {
    "sum_float32": "vaddps",
    "sum_float64": "vaddpd",
    "product_float32": "vmulps",
    "sum_uint8": "vpaddb",
    "sum_uint32": "vpaddd",
    "sum_uint64": "vpaddq",
    "sum_bfloat16": "vaddps",
    "sum_float16": "vaddp[sh]",  # a CPU may have additions of its own for it: the same results
    "sum_float8_e4m3fn": "vaddps",
    "sum_float8_e5m2": "vaddps",
    "max_float32": "v(max|cmp|blend|cmpunord)[a-z]*ps",
    "bxor_uint8": "vxorps|vpxor[dq]?",
    "product_complex64": "vmulps",
    "divide_float32": "vdivps",
    "both_sum_float32": "vaddps",
    "both_avg_float32": "vmulps",
    "both_avg_bfloat16": "vmulps",
    "scale_float32": "vmulps",
}


PRINT_ASSEMBLY = """
import json, sys
from nc10d.kernels import reduce
make = dict(reduce.every_kernel())
made = {make[name](): name for name in sys.argv[1:]}
kernels = [kernel for kernel in reduce._kernels.values() if kernel.address in made]
print(json.dumps({made[kernel.address]: kernel._library.get_asm_str() for kernel in kernels}))
"""


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory):
    """Compile afresh in a process of its own: Numba can't show code that was loaded."""
    env = os.environ | {"NC10D_CACHE_DIR": str(tmp_path_factory.mktemp("code", numbered=True))}
    run = [sys.executable, "-c", PRINT_ASSEMBLY, *PACKED]
    return json.loads(subprocess.run(run, env=env, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 assembly")
@pytest.mark.parametrize("name", PACKED)
def test_kernels_work_on_whole_vectors(name, machine_code):
    # A single loop serves every aliasing form, so a single look at the machine code is enough.
    assert re.search(rf"\b({PACKED[name]})\s[^\n]*%[yz]mm", machine_code[name])


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 CPU")
def test_a_cpu_without_float16_conversions_computes_the_same(tmp_path):
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    env = os.environ | plain | {"NC10D_CACHE_DIR": str(tmp_path / "code")}
    some = "float16 and (16_bit or special or divide or scale or writes)"
    run = [sys.executable, "-m", "pytest", __file__, "-k", some]
    subprocess.run(run, env=env, check=True, stdout=subprocess.DEVNULL)


def test_every_kernel_is_listed_once_and_is_its_own():
    made = [(name, make()) for name, make in reduce.every_kernel()]
    assert len({name for name, _ in made}) == len(made) == len({address for _, address in made})
    listed = {address for _, address in made}
    assert {reduce.kernel_address(*pair) for pair in PAIRS} <= listed
    assert {reduce.divide_address(d) for d in DIVISIBLE} <= listed
    assert {reduce.scale_address(d) for d in DIVISIBLE} <= listed
    assert {reduce.both_address(*pair) for pair in BOTH} <= listed
