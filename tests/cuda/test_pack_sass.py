"""The machine code of the packing kernels has wide words, few registers and no spills.

No GPU is needed, but CUDA's compilers are: `make test-nccl` installs them.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from cuda_tools import NVDISASM, PTXAS, needs_compilers

from nc10d.arrays.dtypes import DType
from nc10d.kernels.gpu.gpu_pack import packing_name
from nc10d.kernels.gpu.gpu_ptx import shipped_ptx

F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
E4M3, E5M2 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2


@dataclass
class Facts:
    """The output of ptxas and nvdisasm for a kernel."""

    registers: int
    spilled: int
    sass: str

    def count(self, *names: str) -> int:
        """Return the number of instructions that begin with any of the names."""
        return sum(len(re.findall(rf"\b{re.escape(name)}", self.sass)) for name in names)


def facts(src: DType, dst: DType, scaled: bool, capability: tuple[int, int], where: Path) -> Facts:
    assert PTXAS, "ptxas is missing"
    assert NVDISASM, "nvdisasm is missing"
    ptx, cubin = where / "kernel.ptx", where / "kernel.cubin"
    ptx.write_text(shipped_ptx(packing_name(src, dst, scaled)))
    command = [PTXAS, f"-arch=sm_{capability[0]}{capability[1]}", "-v", ptx, "-o", cubin]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    shown = subprocess.run([NVDISASM, cubin], capture_output=True, text=True, check=True).stdout
    registers = re.search(r"Used (\d+) registers", output)
    spills = re.findall(r"(\d+) bytes spill", output)
    assert registers
    assert spills, output
    return Facts(int(registers[1]), sum(map(int, spills)), shown)


KERNELS = [
    (F32, F32, False),
    (F32, F32, True),
    (F32, BF16, True),
    (BF16, F32, True),
    (F32, F16, True),
    (F16, F32, True),
    (F32, E4M3, True),
    (E5M2, F32, True),
    (BF16, BF16, True),
]


@needs_compilers
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize(("src", "dst", "scaled"), KERNELS)
def test_a_kernel_moves_words_of_16_bytes_with_few_registers(
    src: DType, dst: DType, scaled: bool, capability: tuple[int, int], tmp_path: Path
) -> None:
    found = facts(src, dst, scaled, capability, tmp_path)
    assert found.registers <= 40
    assert found.spilled == 0
    assert found.count("LDL", "STL") == 0
    # Each 16 bytes of a step must be a single load, and a single store.
    values = 16 // min(src.itemsize, dst.itemsize)
    assert found.count("LDG.E.128") >= values * src.itemsize // 16
    assert found.count("STG.E.128") >= values * dst.itemsize // 16
    if not scaled:
        assert found.count("LDG.E.128") >= 4
        assert found.count("STG.E.128") >= 4
        for middle in ("LDG.E.64", "STG.E.64", "LDG.E", "LDG.E.U8", "STG.E.U8"):
            assert found.count(middle), middle


@needs_compilers
def test_the_four_loads_of_a_copy_come_before_its_stores(tmp_path: Path) -> None:
    """Latency is hidden only if all four are in flight at once."""
    sass = facts(F32, F32, False, (9, 0), tmp_path).sass
    order = "".join(re.findall(r"\b(LD|ST)G\.E\.128", sass)).replace("LD", "l").replace("ST", "s")
    assert "llllssss" in order
