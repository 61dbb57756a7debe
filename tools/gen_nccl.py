"""Write bindings/header_table.py of the NCCL backend: `python tools/gen_nccl.py path/to/nccl.h`.

The table has what nc10d uses of the header. A header does not contain the release that added a
function or a field. The tables below have the releases, from the tags of the NCCL repository, and
are extended by hand.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

Version = tuple[int, int, int]
OLDEST: Version = (2, 18, 0)
"""The oldest release that nc10d supports."""

# The functions that nc10d calls, by the release that brought them.
SINCE: dict[Version, str] = {
    OLDEST: "GetVersion GetUniqueId CommInitRankConfig CommDestroy CommAbort GetErrorString "
    "GetLastError CommGetAsyncError CommSplit RedOpCreatePreMulSum RedOpDestroy Reduce Broadcast "
    "AllReduce ReduceScatter AllGather Send Recv GroupStart GroupEnd",
    (2, 19, 0): "MemAlloc MemFree CommRegister CommDeregister",
    (2, 22, 0): "GroupSimulateEnd",
    (2, 27, 0): "CommWindowRegister CommWindowDeregister",
    (2, 28, 3): "AlltoAll Gather Scatter",
    (2, 29, 2): "CommGetUniqueId CommGrow PutSignal Signal WaitSignal",
    (2, 29, 7): "CommSuspend CommResume CommMemStats",
}
# Fields of ncclConfig_t that came after OLDEST.
FIELDS: dict[Version, str] = {
    (2, 26, 0): "trafficClass",
    (2, 27, 0): "commName collnetEnable CTAPolicy shrinkShare nvlsCTAs",
    (2, 28, 3): "nChannelsPerNetPeer nvlinkCentricSched",
    (2, 29, 2): "graphUsageMode numRmaCtx",
    (2, 30, 3): "maxP2pPeers",
    (2, 30, 5): "graphStreamOrdering",
    (2, 32, 0): "launchOrderImplicit numRmaSig rmaEagerInit hostCftMode nvlsHostMode",
}
CONSTANTS = (
    *("NCCL_UNIQUE_ID_BYTES", "NCCL_API_MAGIC", "NCCL_SUSPEND_MEM"),
    *("NCCL_WIN_COLL_SYMMETRIC", "NCCL_WIN_REQUIRED_ALIGNMENT"),
)
ENUMS = ("ncclResult_t", "ncclRedOp_t", "ncclDataType_t", "ncclCommMemStat_t")
LETTERS = {"size_t": "z", "unsigned int": "u", "int": "i"}

HEAD = '''"""NCCL's C API as data. Made by tools/gen_nccl.py from nccl.h {version}; do not edit.

Letters stand for C types: p any pointer, s const char*, z size_t, i int or an enum, u unsigned int,
D ncclUniqueId by value. A version is (major, minor, patch).
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
    """A field of ncclConfig_t: its type in letters, and the release that it came with."""

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
    out.append("CONFIG = (\n" + "".join(_config(text)) + ")\n")
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
    for name in CONSTANTS:
        (value,) = re.findall(rf"#define {name}\s+(\S+)", text)
        yield f'    "{name}": {int(value, 0)},\n'


def _enums(text: str) -> Iterator[str]:
    for name in ENUMS:
        (body,) = re.findall(rf"typedef enum \{{([^}}]*)\}}\s*{name};", text)
        members = re.findall(r"(\w+)\s*=\s*(-?\d+)\s*(?=,|$)", body.strip())
        inner = ", ".join(f'"{member}": {value}' for member, value in members)
        yield f'    "{name}": {{{inner}}},\n'


def _config(text: str) -> Iterator[str]:
    (body,) = re.findall(r"typedef struct ncclConfig_v\w+ \{([^{}]*)\} ncclConfig_t;", text)
    members = re.findall(r"^\s*(\S.*?)\s*(\w+);", body, re.M)
    for since, group in itertools.groupby(members, _release):
        yield f"    *_since({since}, {', '.join(map(_field, group))}),\n"


def _release(member: tuple[str, str]) -> Version:
    return next((v for v, names in FIELDS.items() if member[1] in names.split()), OLDEST)


def _field(member: tuple[str, str]) -> str:
    kind, name = member
    return f'"{_letter(kind)} {name}"'


def _functions(text: str) -> Iterator[str]:
    found = re.findall(r"^\s*((?:ncclResult_t|const char\*)\s+nccl\w+\([^;{]*\));", text, re.M)
    since = {f"nccl{short}": at for at, names in SINCE.items() for short in names.split()}
    for declaration in found:
        prototype = " ".join(declaration.split())
        result, name, inner = re.fullmatch(r"(.*?) (nccl\w+)\((.*)\)", prototype).groups()  # type: ignore[union-attr]
        if name in since:
            arguments = "".join(
                _letter(re.sub(r"\s*\b\w+$", "", argument.strip()))
                for argument in filter(None, inner.split(","))
            )
            row = f'Function("{_letter(result)}", "{arguments}", {since[name]}, "{prototype}")'
            yield f'    "{name}": {row},\n'


_POINTERS = {"ncclComm_t", "ncclWindow_t", "cudaStream_t"}


def _letter(kind: str) -> str:
    kind = re.sub(r"\s*\*", "*", kind.strip())
    plain = kind.removeprefix("const ")
    if kind == "const char*":
        return "s"
    if plain.endswith("*") or plain in _POINTERS:
        return "p"
    if plain == "ncclUniqueId":
        return "D"
    if plain in LETTERS:
        return LETTERS[plain]
    if re.fullmatch(r"nccl\w+_t", plain):
        return "i"  # an enum
    raise SystemExit(f"unknown C type {kind!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
