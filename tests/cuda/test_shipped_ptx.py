"""The PTX that ships with nc10d is made from its kernels, and assembles for all GPUs from sm_70 on.

No GPU is needed, but CUDA's compilers are: `make test-nccl` installs them.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cuda_tools import PTXAS, needs_compilers

from nc10d.kernels.gpu.gpu_ptx import shipped_ptx

ROOT = Path(__file__).parents[2]
HEAD = re.compile(r"// Made by .*\n// (.*)\n\.version 6\.0\n\.target sm_70\n\.address_size 64\n")
CAPABILITIES = [70, 75, 80, 86, 89, 90, 100, 120]
if "cu13" in str(PTXAS):  # CUDA 13 has dropped Volta
    CAPABILITIES.remove(70)
REGISTERS = {75: 64}
"""A multiprocessor of sm_75 has 1024 threads: four blocks with 64 registers a thread."""


def tool() -> ModuleType:
    """Return tools/gen_ptx.py as a module."""
    spec = importlib.util.spec_from_file_location("gen_ptx", ROOT / "tools" / "gen_ptx.py")
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


GENERATOR = tool()
KERNELS: dict[str, Any] = dict(GENERATOR.kernels())


def test_each_kernel_has_a_file_and_each_file_a_kernel() -> None:
    assert {path.stem for path in GENERATOR.FOLDER.iterdir()} == KERNELS.keys()
    for name, kernel in KERNELS.items():
        text = shipped_ptx(name)
        assert HEAD.match(text), name
        assert re.findall(r"\.entry (\w+)\(", text) == [name]
        arguments = sum(getattr(kind, "count", 1) for kind in kernel.signature.args)
        assert len(re.findall(r"\t\.param \.[uf]64 \w+_param_\d+", text)) == arguments
        assert not re.search(r"\bfma\.|\.local|\.shared", text)


@needs_compilers
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c}")
def test_ptxas_assembles_all_kernels_without_spills(capability: int, tmp_path: Path) -> None:
    """In a single file, which takes a second."""
    texts = [shipped_ptx(name) for name in KERNELS]
    head = HEAD.match(texts[0])
    assert head
    file = tmp_path / "all.ptx"
    file.write_text(head[0] + "".join(HEAD.sub("", text) for text in texts))
    command: list[Any] = [PTXAS, f"-arch=sm_{capability}", "-v", file, "-o", tmp_path / "cubin"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(
        r"Function properties for (\w+)\n.* (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers",
        output,
    )
    assert {name for name, *_ in found} == KERNELS.keys(), output
    for name, stores, loads, registers in found:
        threads, blocks = KERNELS[name].bounds
        most = REGISTERS.get(capability, (1 << 16) // (threads * blocks) // 8 * 8)
        assert (stores, loads) == ("0", "0"), name
        assert int(registers) <= most, name


@needs_compilers
def test_the_files_are_what_the_compilers_make_of_the_kernels() -> None:
    """Where those releases are installed that made the files: others choose other registers."""
    _made_by_these(GENERATOR.releases())
    for name, kernel in KERNELS.items():
        made = GENERATOR.text_of(name, kernel)
        head = HEAD.match(made)
        assert head
        _made_by_these(head[1])
        assert made == shipped_ptx(name), f"{name}: run tools/gen_ptx.py again"


def _made_by_these(releases: str) -> None:
    """Skip the test unless the files name these releases."""
    head = HEAD.match(shipped_ptx("copy_chunk"))
    assert head
    if not head[1].startswith(releases) or 70 not in CAPABILITIES:
        pytest.skip(f"the files are made by {head[1]}, and {releases} are here")
