"""Compiles the emulators of libcuda and libnccl with gcc, once for each state of their sources.

    libraries = build()                  # None where a compiler or NVIDIA's headers are missing
    environment = libraries.environment()

They are compiled against the real cuda.h and nccl.h, of the wheels of CUDA's runtime and of NCCL,
for CUDA 12 or 13: a prototype that is not NVIDIA's does not compile. The headers are found in this
Python's packages: `make test-nccl` has a Python with them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WARNINGS = ["-Wall", "-Wextra", "-Wmissing-declarations", "-Werror"]
CFLAGS = ["-std=gnu11", "-O2", "-g", "-fPIC", "-shared", *WARNINGS]
WANTED = bool(os.environ.get("NC10D_REQUIRE_NCCL"))  # then tests that can't build them fail
CUDA_HEADERS = ("cuda_runtime/include/cuda.h", "cu13/include/cuda.h")  # of either major version
NCCL_HEADER = "nccl/include/nccl.h"
LDFLAGS = ["-Wl,-Bsymbolic", "-Wl,-z,defs", "-pthread", "-ldl", "-lm"]


@dataclass(frozen=True)
class Libraries:
    """Where the two emulators are; their folder has nothing else in it."""

    cuda: Path
    nccl: Path

    def environment(self) -> dict[str, str]:
        """Return the variables with which a new process takes them for the real ones."""
        before = os.environ.get("LD_LIBRARY_PATH", "")
        path = os.pathsep.join(filter(None, [str(self.cuda.parent), before]))
        return {
            "LD_LIBRARY_PATH": path,
            "NC10D_CUDA_LIBRARY": str(self.cuda),
            "NC10D_NCCL_LIBRARY": str(self.nccl),
        }

    def preload(self) -> ctypes.CDLL:
        """Make this process take them for the real ones, before it has loaded any; libcuda's."""
        cuda = ctypes.CDLL(str(self.cuda), ctypes.RTLD_GLOBAL)
        os.environ.update(self.environment())
        return cuda


def build() -> Libraries | None:
    """Return the compiled emulators, None if there is no gcc or no header here.

    Raises CalledProcessError, after the compiler's words, if they don't compile.
    """
    headers = find_headers()
    compiler = shutil.which("gcc")
    if headers is None or compiler is None:
        return None
    folder = ROOT / "build" / "emulators" / _state(headers)
    libraries = Libraries(folder / "libcuda.so.1", folder / "libnccl.so.2")
    if not folder.exists():
        _compile(compiler, headers, libraries)
    return libraries


def find_headers() -> list[Path] | None:
    """Return cuda.h and nccl.h, None if they are not both there."""
    for packages in _packages():
        here = packages / "nvidia"
        cuda = next((here / name for name in CUDA_HEADERS if (here / name).exists()), None)
        if cuda is not None and (here / NCCL_HEADER).exists():
            return [cuda, here / NCCL_HEADER]
    return None


def _packages() -> Iterator[Path]:
    return (Path(entry) for entry in sys.path if entry.endswith("site-packages"))


def _state(headers: list[Path]) -> str:
    files = [*sorted(HERE.glob("*/*.[ch]")), *headers]
    parts = [path.read_bytes() for path in files]
    return hashlib.sha256(b"\0".join([*parts, repr(CFLAGS + LDFLAGS).encode()])).hexdigest()[:16]


def _compile(compiler: str, headers: list[Path], libraries: Libraries) -> None:
    """Compile into a folder aside, and put it in place in one step: others may do the same."""
    place = libraries.cuda.parent
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        include = [flag for header in headers for flag in ("-isystem", str(header.parent))]
        for path in (libraries.cuda, libraries.nccl):
            name = path.name.split(".")[0].removeprefix("lib")
            sources = [str(source) for source in sorted((HERE / name).glob("*.c"))]
            soname = f"-Wl,-soname,{path.name}"
            target = ["-o", str(Path(scratch) / path.name)]
            command = [compiler, *CFLAGS, *include, soname, *target, *sources, *LDFLAGS]
            subprocess.run(command, check=True)
        try:
            os.rename(scratch, place)
        except OSError:
            if not place.exists():
                raise
        Path(scratch).mkdir(exist_ok=True)  # for the context manager to remove


if __name__ == "__main__":
    print(build())
