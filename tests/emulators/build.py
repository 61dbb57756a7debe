"""Compile the emulators of libcuda and libnccl with gcc, once for each version of their sources.

    libraries = build()                  # None without a compiler or NVIDIA's headers
    environment = libraries.environment()

The sources include the real cuda.h (of CUDA 12 or 13) and nccl.h, so a prototype that differs from
NVIDIA's does not compile. The headers come from the wheels of CUDA's runtime and of NCCL in this
Python's packages; `make test-nccl` uses a Python that has them.
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
WANTED = bool(os.environ.get("NC10D_REQUIRE_NCCL"))  # then tests without emulators fail
CUDA_HEADERS = ("cuda_runtime/include/cuda.h", "cu13/include/cuda.h")  # CUDA 12, CUDA 13
NCCL_HEADER = "nccl/include/nccl.h"
LDFLAGS = ["-Wl,-Bsymbolic", "-Wl,-z,defs", "-pthread", "-ldl", "-lm"]


@dataclass(frozen=True)
class Libraries:
    """The paths of both emulators; their folder contains nothing else."""

    cuda: Path
    nccl: Path

    def environment(self) -> dict[str, str]:
        """Return the variables that make a new process load the emulators."""
        before = os.environ.get("LD_LIBRARY_PATH", "")
        path = os.pathsep.join(filter(None, [str(self.cuda.parent), before]))
        return {
            "LD_LIBRARY_PATH": path,
            "NC10D_CUDA_LIBRARY": str(self.cuda),
            "NC10D_NCCL_LIBRARY": str(self.nccl),
        }

    def preload(self) -> ctypes.CDLL:
        """Make this process load the emulators; return the libcuda emulator.

        Call it before the process loads the real libraries.
        """
        cuda = ctypes.CDLL(str(self.cuda), ctypes.RTLD_GLOBAL)
        os.environ.update(self.environment())
        return cuda


def build() -> Libraries | None:
    """Return the compiled emulators; None if gcc or a header is missing.

    Raises CalledProcessError, after the compiler's output, if a source does not compile.
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
    """Return the paths of cuda.h and nccl.h; None if either is missing."""
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
    """Compile in a temporary folder, then rename it: other processes may compile meanwhile."""
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
        Path(scratch).mkdir(exist_ok=True)  # the context manager removes it


if __name__ == "__main__":
    print(build())
