"""The table of NCCL's API is consistent, and a C compiler confirms it against the header."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from nccl_here import HEADERS, needs_headers

from nc10d.backend.nccl.bindings.header_table import (
    CONFIG,
    CONSTANTS,
    ENUMS,
    FUNCTIONS,
    HEADER_VERSION,
    Version,
)
from nc10d.backend.nccl.bindings.library import (
    CTYPES,
    SIM_MAGIC,
    SimInfo,
    WaitSignalDesc,
    config_type,
    dotted,
    version_code,
    version_of,
)
from nc10d.backend.nccl.comm.options import C_NAMES, UNDEFINED, NCCLConfig, as_struct
from nc10d.errors import UnsupportedPlatform

ROOT = Path(__file__).parents[3]
STRUCTS: tuple[type[ctypes.Structure], ...] = (SimInfo, WaitSignalDesc)

# sizeof(ncclConfig_t), as compiled from the headers of these releases.
SIZES = {
    (2, 18, 1): 48,
    (2, 23, 4): 48,
    (2, 27, 7): 72,
    (2, 28, 9): 80,
    (2, 29, 7): 88,
    (2, 30, 7): 96,
    (2, 32, 3): 120,
}


class OfVersion:
    """The part of a Library that a config needs."""

    def __init__(self, version: Version) -> None:
        self.version = version

    def require(self, since: Version, what: str) -> None:
        if self.version < since:
            raise UnsupportedPlatform(f"{what} needs {dotted(since)}")


@pytest.mark.parametrize("version", SIZES)
def test_the_config_of_each_release_has_its_size(version: Version) -> None:
    struct = as_struct(NCCLConfig(), OfVersion(version))  # type: ignore[arg-type]
    assert ctypes.sizeof(struct) == struct.size == SIZES[version]
    assert struct.version == version_code(version)
    assert struct.magic == CONSTANTS["NCCL_API_MAGIC"]


def test_options_that_are_not_set_are_the_librarys_choice() -> None:
    struct = as_struct(NCCLConfig(blocking=0, comm_name="mine"), OfVersion((2, 27, 7)))  # type: ignore[arg-type]
    assert (struct.blocking, struct.commName, struct.netName) == (0, b"mine", None)
    rest = set(C_NAMES) & {name for name, _ in struct._fields_} - {"blocking", "commName"}
    assert {getattr(struct, name) for name in rest - {"netName"}} == {UNDEFINED}


def test_a_field_that_sits_in_the_padding_of_older_releases_is_refused_there() -> None:
    config = NCCLConfig(traffic_class=3)
    with pytest.raises(UnsupportedPlatform, match=r"NCCLConfig.traffic_class needs 2\.26"):
        as_struct(config, OfVersion((2, 25, 1)))  # type: ignore[arg-type]
    assert as_struct(config, OfVersion((2, 26, 2))).trafficClass == 3  # type: ignore[arg-type,attr-defined]


def test_a_library_that_is_newer_than_the_table_gets_the_tables_struct() -> None:
    struct = as_struct(NCCLConfig(), OfVersion((2, 99, 0)))  # type: ignore[arg-type]
    assert (struct.size, struct.version) == (120, version_code(HEADER_VERSION))  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", [(2, 7, 8), (2, 9, 6), (2, 18, 1), (2, 32, 3)])
def test_version_codes_are_read_back(version: Version) -> None:
    major, minor, patch = version
    code = 1000 * major + 100 * minor + patch if minor < 9 else version_code(version)
    assert version_of(code) == version


def test_every_letter_of_a_function_or_field_has_a_type() -> None:
    assert len(FUNCTIONS) == 38
    for row in FUNCTIONS.values():
        assert set(row.arguments + row.result) <= set(CTYPES)
    assert {field.kind for field in CONFIG} <= set(CTYPES)


@needs_headers
def test_the_table_is_what_the_generator_makes_of_the_header() -> None:
    generator = str(ROOT / "tools" / "gen_nccl.py")
    made = subprocess.run(
        [sys.executable, generator, str(HEADERS[0] / "nccl.h")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    names: dict[str, object] = {"__name__": "made"}
    exec(made.stdout, names)
    for name in ("FUNCTIONS", "CONFIG", "ENUMS", "CONSTANTS", "HEADER_VERSION"):
        assert names[name] == globals()[name], f"{name}: run tools/gen_nccl.py again"


@needs_headers
def test_the_simulations_magic_number_is_the_headers() -> None:
    text = (HEADERS[0] / "nccl.h").read_text()
    assert f"{SIM_MAGIC:#x}" in text.partition("NCCL_SIM_INFO_INITIALIZER")[2].partition("}")[0]


def c_source() -> str:
    """Return a program that assigns every function to a typed pointer and prints all layouts."""
    lines = ["#include <nccl.h>", "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    lines += ['#pragma GCC diagnostic ignored "-Wdeprecated-declarations"', 'printf("{");']
    for number, (name, row) in enumerate(FUNCTIONS.items()):
        pointer = row.prototype.replace(name, f"(*f{number})", 1)
        lines.append(f"{pointer} = {name}; (void)f{number};")
        lines.append(f'printf("\\"{name}\\": [0{", %zu" * len(row.arguments)}],"')
        inner = row.prototype.partition("(")[2].rpartition(")")[0]
        kinds = [
            parameter.strip().rpartition(" ")[0]
            for parameter in inner.split(",")
            if parameter.strip() not in ("", "void")
        ]
        stars = [
            "*" if "*" in parameter.rpartition(" ")[2] else "" for parameter in inner.split(",")
        ]
        sizes = [f", sizeof({kind}{star})" for kind, star in zip(kinds, stars, strict=False)]
        lines.append("".join(sizes) + ");")
    lines.append('printf("\\"ncclConfig_t\\": [%zu", sizeof(ncclConfig_t));')
    lines += [f'printf(", %zu", offsetof(ncclConfig_t, {f.name}));' for f in CONFIG]
    lines.append('printf("],");')
    for kind in STRUCTS:
        name = f"{kind.__name__}_t"
        lines.append(f'printf("\\"{name}\\": [%zu", sizeof(nccl{name}));')
        offsets = (f"offsetof(nccl{name}, {field[0]})" for field in kind._fields_)
        lines += [f'printf(", %zu", {offset});' for offset in offsets]
        lines.append('printf("],");')
    for enum in ENUMS.values():
        lines += [f'printf("\\"{member}\\": [%d],", (int){member});' for member in enum]
    lines.append('printf("\\"end\\": []}\\n"); return 0; }')
    return "\n".join(lines)


# The parts of CUDA's headers that nccl.h needs.
CUDA_STUBS = {
    "cuda_runtime.h": """#include <stddef.h>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
#define CUDART_VERSION 12000
""",
    "cuda_fp16.h": "",
    "cuda_bf16.h": "",
}


@needs_headers
def test_the_table_is_the_headers_abi(tmp_path: Path) -> None:
    (tmp_path / "abi.c").write_text(c_source())
    for name, text in CUDA_STUBS.items():
        (tmp_path / name).write_text(text)
    folders = [f"-I{path}" for path in (HEADERS[0], tmp_path)]
    strict = ["-Werror=incompatible-pointer-types", "-Werror=int-conversion"]
    # Only the symbols' types count: nothing is linked.
    command = ["gcc", *strict, *folders, "-DNCCL_OS_LINUX", "abi.c", "-o", "abi"]
    linked = [*command, "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(linked, cwd=tmp_path, check=True, timeout=200)
    printed = json.loads(subprocess.check_output([str(tmp_path / "abi")], text=True, timeout=200))
    for name, row in FUNCTIONS.items():
        sizes = [ctypes.sizeof(CTYPES[letter]) for letter in row.arguments]
        assert printed[name][1:] == sizes, row.prototype
    kind = config_type(HEADER_VERSION)
    offsets = [getattr(kind, field).offset for field, _ in kind._fields_]  # type: ignore[misc]
    assert printed["ncclConfig_t"] == [ctypes.sizeof(kind), *offsets]
    for struct in STRUCTS:
        offsets = [getattr(struct, field[0]).offset for field in struct._fields_]
        assert printed[f"{struct.__name__}_t"] == [ctypes.sizeof(struct), *offsets]
    for enum in ENUMS.values():
        assert {member: printed[member][0] for member in enum} == enum


def test_every_function_of_the_table_has_a_caller() -> None:
    """The generator leaves out functions of the header that nc10d does not call."""
    sources = (ROOT / "nc10d" / "backend" / "nccl").rglob("*.py")
    text = "\n".join(path.read_text() for path in sources if path.name != "header_table.py")
    assert [name for name in FUNCTIONS if f'"{name}"' not in text] == []
