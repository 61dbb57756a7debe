"""Compile the emulator of libucc with gcc, once for each version of its sources.

library = build_ucc()            # the path of libucc.so.1; None without a compiler
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from build import CFLAGS, LDFLAGS, ROOT

SOURCES = Path(__file__).parent / "ucc"
INCLUDE = SOURCES / "include"


def build_ucc() -> Path | None:
    """Return the path of the compiled emulator; None if gcc is missing.

    Raises CalledProcessError, after the compiler's output, if a source does not compile.
    """
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    files = sorted([*SOURCES.glob("*.[ch]"), *INCLUDE.glob("ucc/api/*.h")])
    parts = [path.read_bytes() for path in files]
    state = hashlib.sha256(b"\0".join([*parts, repr(CFLAGS + LDFLAGS).encode()])).hexdigest()[:16]
    library = ROOT / "build" / "emulators" / f"ucc-{state}" / "libucc.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            sources = [str(path) for path in files if path.suffix == ".c"]
            target = [f"-I{INCLUDE}", f"-Wl,-soname,{library.name}", "-o", str(made)]
            subprocess.run([compiler, *CFLAGS, *target, *sources, *LDFLAGS], check=True)
            os.replace(made, library)  # other processes may compile meanwhile
    return library
