"""Write bindings/header_table.py of the NCCL backend: `python tools/gen_nccl.py path/to/nccl.h`.

Use the newest header, since the API only grows. A header does not contain the release that added a
function or a field. The tables below have the releases, from the tags of the NCCL repository, and
are extended by hand. The generator refuses a function or a field that is not in them.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

Version = tuple[int, int, int]
OLDEST: Version = (2, 18, 0)
"""The oldest release that nc10d supports."""

# Functions by the release that brought them; those of OLDEST are BASE.
BASE = """
    GetVersion GetUniqueId CommInitRankConfig CommInitRank CommInitAll CommFinalize CommDestroy
    CommAbort CommSplit GetErrorString GetLastError CommGetAsyncError CommCount CommCuDevice
    CommUserRank RedOpCreatePreMulSum RedOpDestroy Reduce Bcast Broadcast AllReduce ReduceScatter
    AllGather Send Recv GroupStart GroupEnd
"""
LATER: dict[Version, str] = {
    (2, 19, 0): "MemAlloc MemFree CommRegister CommDeregister",
    (2, 22, 0): "GroupSimulateEnd",
    (2, 23, 0): "CommInitRankScalable",
    (2, 24, 0): "ResetDebugInit",
    (2, 27, 0): "CommShrink CommWindowRegister CommWindowDeregister",
    (2, 28, 3): "AlltoAll Gather Scatter",
    (2, 28, 7): "CommRevoke",
    (2, 29, 2): "CommGrow CommGetUniqueId PutSignal Signal WaitSignal WinGetUserPtr",
    (2, 29, 7): "CommSuspend CommResume CommMemStats",
    (2, 30, 5): "ParamBind ParamGet ParamGetI8 ParamGetI16 ParamGetI32 ParamGetI64 ParamGetU8 "
    "ParamGetU16 ParamGetU32 ParamGetU64 ParamGetStr ParamGetParameter ParamGetAllParameterKeys "
    "ParamDumpAll",
    (2, 32, 0): "AllReduceConfig BroadcastConfig ReduceConfig AllGatherConfig ReduceScatterConfig "
    "AlltoAllConfig GatherConfig ScatterConfig SetEncryption",
}
# Fields of ncclConfig_t that came after OLDEST. Other structs have not grown so far.
FIELDS: dict[Version, str] = {
    (2, 26, 0): "trafficClass",
    (2, 27, 0): "commName collnetEnable CTAPolicy shrinkShare nvlsCTAs",
    (2, 28, 3): "nChannelsPerNetPeer nvlinkCentricSched",
    (2, 29, 2): "graphUsageMode numRmaCtx",
    (2, 30, 3): "maxP2pPeers",
    (2, 30, 5): "graphStreamOrdering",
    (2, 32, 0): "launchOrderImplicit numRmaSig rmaEagerInit hostCftMode nvlsHostMode",
}
CONSTANTS = """
    NCCL_UNIQUE_ID_BYTES NCCL_API_MAGIC NCCL_SPLIT_NOCOLOR NCCL_SHRINK_DEFAULT NCCL_SHRINK_ABORT
    NCCL_WIN_DEFAULT NCCL_WIN_COLL_SYMMETRIC NCCL_WIN_STRICT_ORDERING NCCL_WIN_REQUIRED_ALIGNMENT
    NCCL_CTA_POLICY_DEFAULT NCCL_CTA_POLICY_EFFICIENCY NCCL_CTA_POLICY_ZERO
"""
ENUMS = ("ncclResult_t", "ncclRedOp_t", "ncclDataType_t", "ncclScalarResidence_t")
LETTERS = {"size_t": "z", "uint64_t": "U", "unsigned int": "u", "int": "i", "float": "f"}

HEAD = '''"""NCCL's C API as data. Made by tools/gen_nccl.py from nccl.h {version}; do not edit.

Letters stand for C types: p any pointer, s const char*, z size_t, i int or an enum, u unsigned int,
U uint64_t, f float, D ncclUniqueId by value, v void. A version is (major, minor, patch).
"""

# ruff: noqa: E501
from __future__ import annotations

from typing import NamedTuple

Version = tuple[int, int, int]


class Function(NamedTuple):
    """A function: result and arguments in letters, the release it came with, its C prototype."""

    result: str
    arguments: str
    since: Version
    prototype: str


class Field(NamedTuple):
    """A field of a struct: its type in letters, and the release that it came with."""

    name: str
    kind: str
    since: Version


def _since(version: Version, *fields: str) -> tuple[Field, ...]:
    """Return the fields that came with a release, each given as letter and name."""
    return tuple(Field(name, kind, version) for kind, name in map(str.split, fields))


'''


def main(path: str) -> None:
    """Write the table of the header at `path` to standard output."""
    text = _without_comments(Path(path).read_text())
    out = [HEAD.format(version=".".join(map(str, _version(text))))]
    out.append(f"HEADER_VERSION: Version = {_version(text)}\n")
    out.append("CONSTANTS = {\n" + "".join(_constants(text)) + "}\n")
    out.append("ENUMS = {\n" + "".join(_enums(text)) + "}\n")
    out.append("STRUCTS = {\n" + "".join(_structs(text)) + "}\n")
    out.append("FUNCTIONS = {\n" + "".join(_functions(text)) + "}\n")
    sys.stdout.write("\n".join(out))


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def _version(text: str) -> Version:
    major, minor, patch = (
        int(re.findall(rf"#define NCCL_{part} (\d+)", text)[0])
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    return major, minor, patch


def _constants(text: str) -> Iterator[str]:
    for name in CONSTANTS.split():
        (value,) = re.findall(rf"#define {name}\s+(\S+)", text)
        yield f'    "{name}": {int(value, 0)},\n'


def _enums(text: str) -> Iterator[str]:
    for name in ENUMS:
        (body,) = re.findall(rf"typedef enum \{{([^}}]*)\}}\s*{name};", text)
        members = re.findall(r"(\w+)\s*=\s*(-?\d+)\s*(?=,|$)", body.strip())
        inner = ", ".join(f'"{member}": {value}' for member, value in members)
        yield f'    "{name}": {{{inner}}},\n'


def _structs(text: str) -> Iterator[str]:
    bodies = re.findall(r"typedef struct(?: \w+)? (\{(?:[^{}]|\{[^{}]*\})*\})\s*(\w+);", text)
    for body, name in bodies:
        if name == "ncclUniqueId":
            continue  # bytes; its size is a constant
        releases = itertools.groupby(_members(body[1:-1]), functools.partial(_release, name))
        rows = (
            f"        *_since({since}, {', '.join(map(_field, members))}),\n"
            for since, members in releases
        )
        yield f'    "{name}": (\n{"".join(rows)}    ),\n'


def _members(body: str) -> Iterator[tuple[str, str]]:
    """Yield type and name of each field; a union counts as a pointer, a struct as its fields."""
    body = re.sub(r"union \{[^}]*\} (\w+);", r"void* \1;", body)
    body = re.sub(r"struct \{([^}]*)\} \w+;", r"\1", body)
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        kind, name = re.fullmatch(r"(.*?)\s*(\w+)", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        yield kind, name


def _release(struct: str, member: tuple[str, str]) -> Version:
    if struct != "ncclConfig_t":
        return OLDEST
    return next((v for v, names in FIELDS.items() if member[1] in names.split()), OLDEST)


def _field(member: tuple[str, str]) -> str:
    kind, name = member
    return f'"{_letter(kind)} {name}"'


def _functions(text: str) -> Iterator[str]:
    found = re.findall(r"^\s*((?:ncclResult_t|const char\*|void)\s+nccl\w+\([^;{]*\));", text, re.M)
    for declaration in found:
        prototype = " ".join(declaration.split())
        result, name, inner = re.fullmatch(r"(.*?) (nccl\w+)\((.*)\)", prototype).groups()  # type: ignore[union-attr]
        kinds = [
            re.sub(r"\s*\b\w+$", "", argument.strip())
            for argument in inner.split(",")
            if argument.strip() not in ("", "void")
        ]
        arguments = "".join(_letter(kind) for kind in kinds)
        row = f'Function("{_letter(result)}", "{arguments}", {_since(name)}, "{prototype}")'
        yield f'    "{name}": {row},\n'


def _since(name: str) -> Version:
    short = name.removeprefix("nccl")
    if short in BASE.split():
        return OLDEST
    for version, names in LATER.items():
        if short in names.split():
            return version
    raise SystemExit(f"{name}: add to LATER the release that brought it")


_POINTERS = {"ncclComm_t", "ncclWindow_t", "cudaStream_t", "cudaEvent_t", "ncclParamHandle_t"}


def _letter(kind: str) -> str:
    kind = re.sub(r"\s*\*", "*", kind.strip())
    plain = kind.removeprefix("const ")
    if kind == "const char*":
        return "s"
    if plain.endswith("*") or plain in _POINTERS:
        return "p"
    if plain == "ncclUniqueId":
        return "D"
    if plain == "void":
        return "v"
    if plain in LETTERS:
        return LETTERS[plain]
    if re.fullmatch(r"nccl\w+_t", plain):
        return "i"  # an enum
    raise SystemExit(f"unknown C type {kind!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
