"""Write the PTX that ships with nc10d, in nc10d/kernels/gpu/ptx: `python tools/gen_ptx.py`.

A file has one kernel for all GPUs: the driver compiles PTX for the GPU that it finds, if that is as
new as the text's target or newer. Hence the oldest target, and the oldest version of PTX for it.
One target is enough: the kernels convert narrow floats by the CPU's rules in integers, for the same
bits, and instructions of later targets (cvt.rn.bf16x2.f32, sm_80; cvt to e4m3, sm_89) have their
own NaNs.

Needs numba-cuda and NVVM (CUDA 12: sm_70), such as the venv of `make test-nccl`. The texts of other
releases differ in registers and order, so a file names the releases that made it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from nc10d.arrays.dtypes import DType
from nc10d.kernels.gpu import gpu_pack, gpu_strided
from nc10d.kernels.gpu.gpu_ptx import made_ptx

FOLDER = Path(__file__).parents[1] / "nc10d" / "kernels" / "gpu" / "ptx"
TARGET = (7, 0)
PTX_VERSION = "6.0"
"""The first version of PTX that has sm_70 (PTX ISA, "Release notes")."""
FLOATS = (
    *(DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16),
    *(DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2),
)


class Kernel(NamedTuple):
    """A kernel's body as a function of the target, signature, and bounds; see `made_ptx`."""

    body: Any
    signature: Any
    bounds: tuple[int, int]


def kernels() -> Iterator[tuple[str, Kernel]]:
    """Yield the name of each kernel, and the kernel."""
    packing = gpu_pack.SIGNATURE, gpu_pack.BOUNDS
    yield (
        gpu_pack.packing_name(DType.UINT8, DType.UINT8, False),
        Kernel(gpu_pack.copy_body, *packing),
    )
    for src, dst in itertools.product(FLOATS, FLOATS):
        body = functools.partial(gpu_pack.cast_body, src=src, dst=dst)
        yield gpu_pack.packing_name(src, dst, True), Kernel(body, *packing)
    for word in gpu_pack.WORDS:
        body = functools.partial(gpu_strided.strided_body, word=word)
        kernel = Kernel(body, gpu_strided.SIGNATURE, gpu_strided.BOUNDS)
        yield gpu_strided.strided_name(word), kernel


def text_of(name: str, kernel: Kernel) -> str:
    """Return a kernel's file: the compiler's PTX without Numba's long names."""
    made = made_ptx(name, kernel.body, kernel.signature, TARGET, kernel.bounds)
    compiler = re.search(r"release [\d.]+, V([\d.]+)", made)
    entry = re.search(r"\.visible \.entry (\w+)\(", made)
    assert compiler, "NVVM tells its release"
    assert entry, "NVVM made no kernel"
    code = made[entry.start() :].replace(entry[1], name).strip()
    return (
        f"// Made by tools/gen_ptx.py; do not edit.\n"
        f"// {releases()}, NVVM {compiler[1]}\n"
        f".version {PTX_VERSION}\n.target sm_{TARGET[0]}{TARGET[1]}\n.address_size 64\n\n{code}\n"
    )


def releases() -> str:
    """Return the releases of the packages on which a text depends."""
    return ", ".join(f"{name} {version(name)}" for name in ("numba-cuda", "numba", "llvmlite"))


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.ptx"):
        old.unlink()
    for name, kernel in kernels():
        (FOLDER / f"{name}.ptx").write_text(text_of(name, kernel))


if __name__ == "__main__":
    main()
