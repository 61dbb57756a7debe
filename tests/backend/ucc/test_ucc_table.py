"""The table of UCC's API: a C compiler confirms it against the emulator's header and UCC's own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from emulated_ucc import INCLUDE

from nc10d.backend.ucc.structs import CTYPES, STRUCT_TYPES, field_name
from nc10d.backend.ucc.ucc_table import ENUMS, FUNCTIONS, OOB_CALLBACKS, STRUCTS

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
# UCC's own header, where it is installed or named.
OWN = [Path(folder) for folder in (os.environ.get("NC10D_REQUIRE_UCC_INCLUDE", "/usr/include"),)]
HEADERS = [INCLUDE, *(folder for folder in OWN if (folder / "ucc/api/ucc.h").exists())]


def test_every_letter_of_a_function_or_field_has_a_type() -> None:
    for row in FUNCTIONS.values():
        assert set(row.arguments + row.result) <= set(CTYPES)
    assert set("".join(OOB_CALLBACKS.values())) <= set(CTYPES)
    kinds = {field.split(" ")[0] for fields in STRUCTS.values() for field in fields}
    assert kinds <= set(CTYPES) | set(STRUCTS)


def c_source() -> str:
    """Return a program that assigns every function to a typed pointer and prints all layouts."""
    lines = ["#include <ucc/api/ucc.h>", "#include <stdio.h>", 'int main(void) { printf("{");']
    for number, (name, row) in enumerate(FUNCTIONS.items()):
        pointer = row.prototype.replace(f"{name}(", f"(*f{number})(", 1)
        lines.append(f"{pointer} = {name}; (void)f{number};")
    for name, fields in STRUCTS.items():
        lines.append(f'printf("\\"{name}\\": [%zu", sizeof({name}));')
        for field in fields:
            inner = field.partition(" ")[2]
            lines.append(f'printf(", %zu", offsetof({name}, {inner}));')
            lines.append(f'printf(", %zu", sizeof((({name} *)0)->{inner}));')
        lines.append('printf("],");')
    for enum in ENUMS.values():
        lines += [f'printf("\\"{member}\\": %ld,", (long){member});' for member in enum]
    return "\n".join([*lines, 'printf("\\"end\\": 0}\\n"); return 0; }'])


@needs_gcc
@pytest.mark.parametrize("include", HEADERS, ids=["emulator", "own"][: len(HEADERS)])
def test_the_table_is_the_headers_abi(include: Path, tmp_path: Path) -> None:
    (tmp_path / "abi.c").write_text(c_source())
    strict = ["-Werror=incompatible-pointer-types", "-Werror=int-conversion", f"-I{include}"]
    # Only the symbols' types count: nothing is linked.
    command = ["gcc", *strict, "abi.c", "-o", "abi", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=200)
    printed = json.loads(subprocess.check_output([str(tmp_path / "abi")], text=True, timeout=200))
    for name, fields in STRUCTS.items():
        kind, layout = STRUCT_TYPES[name], []
        for field in fields:
            described = getattr(kind, field_name(field.partition(" ")[2]))
            layout += [described.offset, described.size]
        assert printed[name] == [ctypes.sizeof(kind), *layout], name
    for enum in ENUMS.values():
        assert {member: printed[member] for member in enum} == enum
