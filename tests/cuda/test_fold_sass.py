"""Kernels that fold are PTX that ptxas takes for every GPU; none contracts a product with a sum."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_tools import HERE, NVDISASM, PTXAS, needs_compilers

import nc10d
from nc10d.arrays.dtypes import DType, ElementType, element_of
from nc10d.errors import UnsupportedPlatform
from nc10d.kernels.gpu.gpu_ptx import Capability
from nc10d.kernels.gpu.gpu_reduce import fold_ptx
from nc10d.ops import AVG, PRODUCT, SUM, ReduceOp, premul_sum

CAPABILITIES = [(7, 0), (7, 5), (8, 0), (9, 0), (12, 0)]
if "cu13" in str(PTXAS):  # CUDA 13 has dropped Volta
    CAPABILITIES.remove((7, 0))
READABLE = (7, 5)
"""The oldest machine code that every nvdisasm reads."""
AFFINE = np.dtype([("slope", "f4"), ("offset", "f4")])
PACKED = np.dtype([("kind", "i1"), ("value", "f4")])
LIST = np.dtype([("values", "f8", (4,)), ("count", "i8")])


@nc10d.reduction(AFFINE)
def affine(a, b):  # type: ignore[no-untyped-def]
    return a.slope * b.slope, a.offset * b.slope + b.offset


HALVES = np.dtype([("values", "f2", (3,)), ("on", "?")])


@nc10d.reduction(HALVES)
def halved(a, b, out):  # type: ignore[no-untyped-def]
    for i in range(3):
        out.values[i] = a.values[i] * np.float32(0.5) + b.values[i]


@nc10d.reduction(LIST)
def scaled_sum(a, b, out):  # type: ignore[no-untyped-def]
    for i in range(4):
        out.values[i] = a.values[i] * b.count + b.values[i]
    out.count = a.count + b.count


@nc10d.reduction(PACKED, map=lambda a: (a.kind, -a.value))
def packed(a, b):  # type: ignore[no-untyped-def]
    return b if b.value > a.value else a


KERNELS: list[tuple[ReduceOp, ElementType]] = [
    (SUM, DType.FLOAT32),
    (AVG, DType.BFLOAT16),
    (AVG, DType.FLOAT8_E4M3FN),
    (premul_sum(0.5), DType.FLOAT16),
    (premul_sum(0.5), DType.FLOAT64),
    (PRODUCT, DType.COMPLEX64),
    (AVG, DType.INT16),
    (affine, element_of(AFFINE)),
    (scaled_sum, element_of(LIST)),
    (halved, element_of(HALVES)),
]


def assembled(op: ReduceOp, element: ElementType, capability: Capability, where: Path) -> Path:
    """Return a kernel's machine code; fail if ptxas refuses the PTX, or spills registers."""
    assert PTXAS, "ptxas is missing"
    ptx, cubin = where / "kernel.ptx", where / "kernel.cubin"
    text = fold_ptx(op.kind, element, capability)
    assert not re.search(r"\bfma\.", text)
    ptx.write_text(text)
    command: list[Any] = [PTXAS, f"-arch=sm_{capability[0]}{capability[1]}", "-v", ptx, "-o", cubin]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert set(re.findall(r"(\d+) bytes spill", output)) == {"0"}, output
    return cubin


def sass_of(cubin: Path) -> str:
    """Return machine code as text."""
    assert NVDISASM, "nvdisasm is missing"
    return subprocess.run([NVDISASM, cubin], capture_output=True, text=True, check=True).stdout


@needs_compilers
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize(("op", "element"), KERNELS, ids=lambda x: getattr(x, "label", repr(x)))
def test_ptxas_assembles_each_kernel_and_contracts_nothing(
    op: ReduceOp, element: ElementType, capability: tuple[int, int], tmp_path: Path
) -> None:
    cubin = assembled(op, element, capability, tmp_path)
    if capability >= READABLE and not op.kind.finishes:  # a division is made of these instructions
        assert not re.search(r"\b[FD]FMA", sass_of(cubin))


@needs_compilers
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16])
def test_numbers_go_in_words_of_16_bytes(dtype: DType, tmp_path: Path) -> None:
    sass = sass_of(assembled(SUM, dtype, (9, 0), tmp_path))
    assert len(re.findall(r"\bLDG\.E\.128", sass)) >= 2, "the first row, and each of the others"
    assert re.search(r"\bSTG\.E\.128", sass)


@needs_compilers
def test_a_function_that_cuda_lacks_is_a_type_error_that_quotes_the_line() -> None:
    @nc10d.reduction(np.float64)
    def next_after(a, b):  # type: ignore[no-untyped-def]
        return np.spacing(a) + b

    with pytest.raises(TypeError, match=r"next_after can't be a reduction: .*spacing.*\n.*line"):
        fold_ptx(next_after.kind, DType.FLOAT64, (9, 0))


@needs_compilers
def test_fields_that_are_not_aligned_are_read_by_bytes() -> None:
    """A wider load would be an error on a card, which the CPU does not show."""
    text = fold_ptx(packed.kind, element_of(PACKED), (9, 0))
    assert set(re.findall(r"\b(?:ld|st)\.global\.(\S+)", text)) <= {"u8", "s8"}
    text = fold_ptx(affine.kind, element_of(AFFINE), (9, 0))
    assert not re.findall(r"\b(?:ld|st)\.global\.\w8\b", text)


@pytest.mark.skipif(HERE, reason="the compilers are here")
def test_without_compilers_an_error_names_the_packages_to_install() -> None:
    with pytest.raises(UnsupportedPlatform, match=r"\[cu12\]"):
        fold_ptx(SUM.kind, DType.FLOAT32, (9, 0))


KEPT = """
import sys, zlib
from nc10d.arrays.dtypes import DType
from nc10d.kernels.gpu.gpu_reduce import fold_ptx
from nc10d.ops import SUM

text = fold_ptx(SUM.kind, DType.FLOAT32, (9, 0))
print(zlib.crc32(text.encode()), "numba.cuda" in sys.modules)
"""


def output_of(program: str, cache: Path) -> list[str]:
    """Return what a program prints that has a cache of its own."""
    environment = os.environ | {"NC10D_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.check_output(command, env=environment, text=True).splitlines()


@needs_compilers
def test_ptx_is_made_once_a_machine(tmp_path: Path) -> None:
    first, second = (output_of(KEPT, tmp_path / "cache")[0].split() for _ in range(2))
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("True", "False")


# numba-cuda 0.30 has this function's name where NumPy 2.5 no longer has it.
NEW_NUMPY = """
import numba, numpy
from nc10d.errors import UnsupportedPlatform
del numpy.row_stack
for _ in range(2):
    try:
        exec(program)
    except UnsupportedPlatform as error:
        print(error)
"""


@needs_compilers
def test_an_error_says_that_numpy_is_too_new_for_numba_cuda(tmp_path: Path) -> None:
    found = output_of(f"program = {KEPT!r}\n{NEW_NUMPY}", tmp_path / "cache")
    assert len(found) == 2
    for text in found:
        assert re.match(
            r"numba-cuda [\d.]+ needs numpy < 2\.5, got numpy [\d.]+: .*row_stack", text
        )
