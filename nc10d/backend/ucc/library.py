"""libucc by ctypes: found, loaded, and called by the header table; failed calls raise.

The library is that of NC10D_UCC_LIBRARY, else libucc.so.1 as the system's loader finds it
(LD_LIBRARY_PATH), else that of an HPC-X in HPCX_UCC_DIR or HPCX_DIR. libucc itself loads UCX
(libucp.so.0): that in the wheel libucx-cu12 or -cu13, else that which the system's loader finds.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from nc10d.backend.ucc.structs import CTYPES
from nc10d.backend.ucc.ucc_table import ENUMS, FUNCTIONS
from nc10d.base.run_to_end import off_main
from nc10d.errors import UCCError, UnsupportedPlatform

STATUS = ENUMS["ucc_status_t"]
STATUS_NAMES = {code: name for name, code in STATUS.items()}
OK, IN_PROGRESS = STATUS["UCC_OK"], STATUS["UCC_INPROGRESS"]
API_VERSION = (1, 0)
"""The oldest UCC API that has all functions and fields that nc10d uses."""
_SONAME = "libucc.so.1"
_HPCX = (("HPCX_UCC_DIR", "lib"), ("HPCX_DIR", "ucc/lib"))
_HOW = (
    "no package index has libucc: take that of NVIDIA's HPC-X or of the system "
    "(libucc1), and name it by NC10D_UCC_LIBRARY"
)


class UccLibrary:
    """A loaded libucc. Calls release the GIL."""

    @off_main
    def __init__(self, path: str) -> None:
        """Load the library at `path`; UnsupportedPlatform if that can't be."""
        self.path = path
        # UCX from the wheel libucx-cu12 or -cu13, so that libucc finds it.
        if importlib.util.find_spec("libucx") is not None:
            importlib.import_module("libucx").load_library()
        try:
            dll = ctypes.CDLL(path)
        except OSError as error:
            raise UnsupportedPlatform(f"UCC can't be loaded ({error}): {_HOW}") from error
        self._functions = {name: self._typed(dll, name) for name in FUNCTIONS}
        numbers = [ctypes.c_uint() for _ in range(3)]
        self._functions["ucc_get_version"](*map(ctypes.byref, numbers))
        self.version = tuple(number.value for number in numbers)
        if self.version[0] != API_VERSION[0]:
            text = ".".join(map(str, self.version))
            raise UnsupportedPlatform(f"{path} is UCC {text}, and nc10d needs UCC 1: {_HOW}")

    def _typed(self, dll: ctypes.CDLL, name: str) -> Any:
        row = FUNCTIONS[name]
        try:
            function = dll[name]
        except AttributeError as error:
            raise UnsupportedPlatform(f"{self.path} has no {name}: it is no libucc") from error
        function.restype = CTYPES[row.result]
        function.argtypes = [CTYPES[letter] for letter in row.arguments]
        return function

    def function(self, name: str) -> Any:
        """Return a function in the table as ctypes calls it."""
        return self._functions[name]

    def call(self, name: str, *arguments: object) -> int:
        """Call a function; return the status unless that is an error, which raises UCCError."""
        status = int(self._functions[name](*arguments))
        if status < 0:
            raise self.error(name, status)
        return status

    def error(self, call_name: str, status: int) -> UCCError:
        """Return the error of a failed call, with the status's name and UCC's text."""
        text = (self._functions["ucc_status_string"](status) or b"").decode(errors="replace")
        name = STATUS_NAMES.get(status, f"status {status}")
        hint = "; UCC_LOG_LEVEL=info shows more"
        return UCCError(f"{call_name}: {name} ({text}){hint}", code=status)


@functools.cache
def library() -> UccLibrary:
    """Return this process's libucc, loaded at the first call."""
    return UccLibrary(find_library())


@off_main
def find_library() -> str:
    """Return the path, or the bare name, of the libucc to load; see the module."""
    asked = os.environ.get("NC10D_UCC_LIBRARY")
    if asked:
        return asked
    try:
        ctypes.CDLL(_SONAME)
    except OSError:
        folders = ((os.environ.get(name), below) for name, below in _HPCX)
        found = (Path(folder, below, _SONAME) for folder, below in folders if folder)
        return next((str(path) for path in found if path.exists()), _SONAME)
    return _SONAME
