"""libnccl by ctypes: found, loaded, and called by the header table; failed calls raise.

The library is NC10D_NCCL_LIBRARY's, else that in the wheel nvidia-nccl-cu12 or -cu13, else the
system's libnccl.so.2. A function that is newer than the loaded release raises UnsupportedPlatform,
which names the function's first release. Functions are looked up at first use.

AMD's RCCL (named by NC10D_NCCL_LIBRARY) loads by the same table and tells its version; those
functions exist that RCCL exports under the table's names. Nothing more is known: nc10d has no
driver for AMD's devices.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

from nc10d.backend.nccl.bindings.header_table import CONFIG, CONSTANTS, ENUMS, FUNCTIONS, Version
from nc10d.base.run_to_end import off_main
from nc10d.cuda.driver import require_device
from nc10d.errors import NCCLError, UnsupportedPlatform

RESULT = ENUMS["ncclResult_t"]
SUCCESS, IN_PROGRESS = RESULT["ncclSuccess"], RESULT["ncclInProgress"]
_SONAME = "libnccl.so.2"
_HOW = (
    'pip install ".[cu12]" (or cu13) in a checkout of nc10d, '
    "or name a libnccl.so.2 by NC10D_NCCL_LIBRARY"
)
_ON_ONE_GPU = (
    '; ranks that share a GPU need the backend "cuda:staged", or each rank another value of the '
    "environment variable NCCL_HOSTID"
)


class UniqueId(ctypes.Structure):
    """ncclUniqueId: the same on all of a communicator's ranks; passed by value."""

    _fields_ = (("internal", ctypes.c_char * CONSTANTS["NCCL_UNIQUE_ID_BYTES"]),)


class SimInfo(ctypes.Structure):
    """ncclSimInfo_t: the estimate by ncclGroupSimulateEnd, in microseconds."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("estimatedTime", ctypes.c_float),
    )


SIM_MAGIC = 0x74685283
"""NCCL_SIM_INFO_INITIALIZER's magic (nccl.h)."""


class WaitSignalDesc(ctypes.Structure):
    """ncclWaitSignalDesc_t: how many signals to wait for, and from which rank."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("opCnt", "peer", "sigIdx", "ctx"))


CTYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "s": ctypes.c_char_p,
    "z": ctypes.c_size_t,
    "i": ctypes.c_int,
    "u": ctypes.c_uint,
    "D": UniqueId,
}


class Library:
    """A loaded libnccl. Calls release the GIL."""

    @off_main
    def __init__(self, path: str) -> None:
        """Load the library at `path`; UnsupportedPlatform if that can't be."""
        self.path = path
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as error:
            raise UnsupportedPlatform(f"NCCL can't be loaded ({error}): {_HOW}") from error
        code = ctypes.c_int()
        self._raw("ncclGetVersion")(ctypes.byref(code))
        self.version: Version = version_of(code.value)
        self._functions: dict[str, Any] = {}
        self._addresses: dict[str, int] = {}

    @property
    def name(self) -> str:
        """NCCL, or RCCL for a library that exports a function of RCCL's own."""
        return "RCCL" if hasattr(self._dll, "ncclAllToAllv") else "NCCL"

    def has(self, name: str) -> bool:
        """Return whether this release has a function in the table."""
        return FUNCTIONS[name].since <= self.version and hasattr(self._dll, name)

    def require(self, since: Version, call_name: str) -> None:
        """Raise UnsupportedPlatform if this release is older than `since`."""
        if self.version < since:
            this = f"this is {self.name} {dotted(self.version)}"
            message = f"{call_name} needs NCCL >= {dotted(since)}, {this}"
            raise UnsupportedPlatform(f"{message} ({self.path})")

    def function(self, name: str) -> Any:
        """Return a function in the table as ctypes calls it; UnsupportedPlatform if too new."""
        found = self._functions.get(name)
        if found is None:
            self.require(FUNCTIONS[name].since, name)
            found = self._functions[name] = self._raw(name)
        return found

    def address(self, name: str) -> int:
        """Return a function's address, for compiled code that calls it."""
        found = self._addresses.get(name)
        if found is None:
            found = self._addresses[name] = _address(self.function(name))
        return found

    def _raw(self, name: str) -> Any:
        row = FUNCTIONS[name]
        try:
            function = self._dll[name]
        except AttributeError as error:
            message = f"{self.path} has no {name}, which NCCL has from {dotted(row.since)} on"
            raise UnsupportedPlatform(message) from error
        function.restype = CTYPES[row.result]
        function.argtypes = [CTYPES[letter] for letter in row.arguments]
        return function

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function; return SUCCESS or IN_PROGRESS, raise NCCLError for anything else."""
        code = int(self.function(name)(*arguments))
        self.check(code, name)
        return code

    def check(self, code: int, call_name: str) -> None:
        """Raise NCCLError, with NCCL's own message, if a result is a failure."""
        if code not in (SUCCESS, IN_PROGRESS):
            raise NCCLError(f"{call_name}: {self.describe(code)}", code=code)

    def describe(self, code: int) -> str:
        """Return NCCL's text for a failed result, and NCCL's last error message."""
        # NCCL keeps the last message even when later calls succeed.
        text = self.function("ncclGetErrorString")(code).decode(errors="replace")
        last = (self.function("ncclGetLastError")(None) or b"").decode(errors="replace").strip()
        if code == RESULT["ncclInvalidUsage"] and "Duplicate GPU" in last:
            last += _ON_ONE_GPU
        return f"{text} ({last})" if last else text

    def unique_id(self) -> bytes:
        """Return the 128 bytes that a new communicator's ranks need; starts a listener."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


def _address(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def version_of(code: int) -> Version:
    """Read NCCL_VERSION_CODE (nccl.h: 2.8 and older count in hundreds)."""
    if code < 10_000:
        return code // 1000, code // 100 % 10, code % 100
    return code // 10_000, code // 100 % 100, code % 100


def version_code(version: Version) -> int:
    """Return the NCCL_VERSION_CODE for a release after 2.8."""
    major, minor, patch = version
    return 10_000 * major + 100 * minor + patch


def dotted(version: Version) -> str:
    """Return a version as text, without a patch of 0: "2.27" is the first in its line."""
    return ".".join(map(str, version if version[2] else version[:2]))


@functools.cache
def config_type(version: Version) -> type[ctypes.Structure]:
    """Return ncclConfig_t in a release's form, without later fields."""
    fields = [(f.name, CTYPES[f.kind]) for f in CONFIG if f.since <= version]
    return type("ncclConfig_t", (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def library() -> Library:
    """Return this process's libnccl, loaded at the first call."""
    return Library(find_library())


def require() -> None:
    """Raise UnsupportedPlatform, with the reason, where NCCL can't work."""
    require_device()
    library()


def find_library() -> str:
    """Return the path, or the bare name, of the libnccl to load; see the module."""
    asked = os.environ.get("NC10D_NCCL_LIBRARY")
    if asked:
        return asked
    spec = importlib.util.find_spec("nvidia")  # the folder that NVIDIA's wheels share
    folders = spec.submodule_search_locations if spec else None
    found = (Path(folder, "nccl", "lib", _SONAME) for folder in folders or ())
    return next((str(path) for path in found if path.exists()), _SONAME)
