"""UCC's collectives on contiguous memory: each call posts one, and returns its request.

Counts and displacements are in elements. A request keeps the arguments alive that UCC points at.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from nc10d.backend.polled.flat_buffers import FlatBuffer
from nc10d.backend.ucc.datatypes import UccReduction, carrier
from nc10d.backend.ucc.library import IN_PROGRESS, OK, STATUS
from nc10d.backend.ucc.structs import BufferInfo, BufferInfoV, CollArgs
from nc10d.backend.ucc.team import UccTeam
from nc10d.backend.ucc.ucc_table import ENUMS
from nc10d.errors import UCCError

_KINDS = ENUMS["ucc_coll_type_t"]
_MASKS = ENUMS["masks"]
_MEMORY = ENUMS["ucc_memory_type_t"]
_WIDE = _MASKS["UCC_COLL_ARGS_FLAG_COUNT_64BIT"] | _MASKS["UCC_COLL_ARGS_FLAG_DISPLACEMENTS_64BIT"]
_IN_PLACE = _MASKS["UCC_COLL_ARGS_FLAG_IN_PLACE"]

Chunks = tuple[FlatBuffer, Sequence[int]]
"""Memory, and the elements of each rank's chunk of it, one after the other."""


class UccRequest:
    """A collective that has been posted."""

    __slots__ = ("_args", "_handle", "_kept", "_name", "_team")

    def __init__(self, team: UccTeam, name: str, args: Any, kept: Any) -> None:
        """Post a collective; UCCError, and nothing is in flight, if UCC refuses it."""
        self._team, self._name, self._args, self._kept = team, name, args, kept
        call, made = team.context.library.call, ctypes.c_void_p()
        call("ucc_collective_init", ctypes.byref(args), ctypes.byref(made), team.handle)
        self._handle = made.value or 0
        try:
            call("ucc_collective_post", self._handle)
        except UCCError:
            with contextlib.suppress(UCCError):
                call("ucc_collective_finalize", self._handle)
            raise

    def ready(self) -> bool:
        """Return whether the collective has ended; UCCError if it failed. Never blocks."""
        if not self._handle:
            return True
        # The header defines ucc_collective_test as a look at the request's first word.
        status = ctypes.c_int.from_address(self._handle).value
        if status >= IN_PROGRESS:
            return False
        handle, self._handle = self._handle, 0
        library = self._team.context.library
        finalized = library.function("ucc_collective_finalize")(handle)
        for code in (status, finalized):
            if code != OK:
                raise library.error(self._name, code)
        return True


def all_reduce(team: UccTeam, x: FlatBuffer, how: UccReduction) -> UccRequest:
    """x := the reduction over all ranks of x"""
    return _post(team, "ALLREDUCE", dst=_reduced(x, how), op=how.op, flags=_IN_PLACE)


def reduce(team: UccTeam, x: FlatBuffer, how: UccReduction, root: int) -> UccRequest:
    """x := the reduction over all ranks of x, on the root"""
    info = _reduced(x, how)
    if team.rank == root:
        return _post(team, "REDUCE", dst=info, op=how.op, root=root, flags=_IN_PLACE)
    return _post(team, "REDUCE", src=info, op=how.op, root=root)


def reduce_scatter(team: UccTeam, out: FlatBuffer, inp: Chunks, how: UccReduction) -> UccRequest:
    """out := the reduction over all ranks of this rank's chunk of inp"""
    whole, counts = inp
    src = _reduced(whole, how)
    if len(set(counts)) == 1:
        return _post(team, "REDUCE_SCATTER", src, _reduced(out, how), op=how.op)
    wide = [n * how.width for n in counts]
    dst, kept = _vector(out, wide, how.datatype)
    return _post(team, "REDUCE_SCATTERV", src, dst, op=how.op, kept=kept)


def broadcast(team: UccTeam, x: FlatBuffer, root: int) -> UccRequest:
    """x := the root's x"""
    return _post(team, "BCAST", src=_moved(x), root=root)


def all_gather(team: UccTeam, out: Chunks, inp: FlatBuffer) -> UccRequest:
    """out := all ranks' inp; every rank knows all counts"""
    whole, counts = out
    in_place = _is_own(inp, out, team.rank)
    src, flags = (None, _IN_PLACE) if in_place else (_moved(inp), 0)
    if len(set(counts)) == 1:
        return _post(team, "ALLGATHER", src, _moved(whole), flags=flags)
    dst, kept = _vector(whole, counts, carrier(whole.dtype))
    return _post(team, "ALLGATHERV", src, dst, flags=flags, kept=kept)


def all_to_all(team: UccTeam, out: FlatBuffer, inp: FlatBuffer) -> UccRequest:
    """Exchange equal chunks."""
    return _post(team, "ALLTOALL", _moved(inp), _moved(out))


def all_to_all_v(team: UccTeam, out: Chunks, inp: Chunks) -> UccRequest:
    """Exchange chunks of any size."""
    src, sent = _vector(*inp, carrier(inp[0].dtype))
    dst, taken = _vector(*out, carrier(out[0].dtype))
    return _post(team, "ALLTOALLV", src, dst, kept=(sent, taken))


def gather(team: UccTeam, out: FlatBuffer | None, inp: FlatBuffer, root: int) -> UccRequest:
    """out := all ranks' inp, on the root; all of the same size"""
    if out is None:
        return _post(team, "GATHER", src=_moved(inp), root=root)
    in_place = _is_own(inp, (out, [inp.count] * team.size), team.rank)
    src, flags = (None, _IN_PLACE) if in_place else (_moved(inp), 0)
    return _post(team, "GATHER", src, _moved(out), root=root, flags=flags)


def gather_v(team: UccTeam, out: Chunks | None, inp: FlatBuffer, root: int) -> UccRequest:
    """out := all ranks' inp, on the root, which knows all counts"""
    if out is None:
        return _post(team, "GATHERV", src=_moved(inp), root=root)
    dst, kept = _vector(*out, carrier(inp.dtype))
    src, flags = (None, _IN_PLACE) if _is_own(inp, out, team.rank) else (_moved(inp), 0)
    return _post(team, "GATHERV", src, dst, root=root, flags=flags, kept=kept)


def scatter(team: UccTeam, out: FlatBuffer, inp: FlatBuffer | None, root: int) -> UccRequest:
    """out := this rank's chunk of the root's inp; all chunks of the same size"""
    if inp is None:
        return _post(team, "SCATTER", dst=_moved(out), root=root)
    in_place = _is_own(out, (inp, [out.count] * team.size), team.rank)
    dst, flags = (None, _IN_PLACE) if in_place else (_moved(out), 0)
    return _post(team, "SCATTER", _moved(inp), dst, root=root, flags=flags)


def scatter_even(team: UccTeam, out: FlatBuffer, inp: FlatBuffer | None, root: int) -> UccRequest:
    """As `scatter`, by the form for chunks of any size where UCC does not have the other."""
    # UCP, UCC 1.8's transport on the host, has scatterv and no scatter: on every rank alike.
    try:
        return scatter(team, out, inp, root)
    except UCCError as error:
        if error.code != STATUS["UCC_ERR_NOT_SUPPORTED"]:
            raise
    chunks = None if inp is None else (inp, [out.count] * team.size)
    return scatter_v(team, out, chunks, root)


def scatter_v(team: UccTeam, out: FlatBuffer, inp: Chunks | None, root: int) -> UccRequest:
    """out := this rank's chunk of the root's inp; only the root knows all counts"""
    if inp is None:
        return _post(team, "SCATTERV", dst=_moved(out), root=root)
    src, kept = _vector(*inp, carrier(out.dtype))
    dst, flags = (None, _IN_PLACE) if _is_own(out, inp, team.rank) else (_moved(out), 0)
    return _post(team, "SCATTERV", src, dst, root=root, flags=flags, kept=kept)


def barrier(team: UccTeam) -> UccRequest:
    """No rank leaves before every rank has come."""
    return _post(team, "BARRIER")


def _post(
    team: UccTeam,
    kind: str,
    src: Any = None,
    dst: Any = None,
    *,
    op: int = 0,
    root: int = 0,
    flags: int = 0,
    kept: Any = None,
) -> UccRequest:
    vectors = any(isinstance(info, BufferInfoV) for info in (src, dst))
    args = CollArgs(
        mask=_MASKS["UCC_COLL_ARGS_FIELD_FLAGS"] if flags or vectors else 0,
        coll_type=_KINDS[f"UCC_COLL_TYPE_{kind}"],
        op=op,
        flags=flags | (_WIDE if vectors else 0),
        root=root,
    )
    for field, info in (("src", src), ("dst", dst)):
        if info is not None:  # either form of a union
            place = ctypes.addressof(args) + getattr(CollArgs, field).offset
            ctypes.memmove(place, ctypes.byref(info), ctypes.sizeof(info))
    return UccRequest(team, f"UCC's {kind.lower()}", args, kept)


def _memory_type(x: FlatBuffer) -> int:
    return _MEMORY[f"UCC_MEMORY_TYPE_{'HOST' if x.device == 'cpu' else x.device.upper()}"]


def _moved(x: FlatBuffer) -> Any:
    return BufferInfo(x.address, x.count, carrier(x.dtype), _memory_type(x))


def _reduced(x: FlatBuffer, how: UccReduction) -> Any:
    return BufferInfo(x.address, x.count * how.width, how.datatype, _memory_type(x))


def _vector(x: FlatBuffer, counts: Sequence[int], datatype: int) -> tuple[Any, Any]:
    """Return a buffer in chunks, and the arrays that it points at."""
    words = ctypes.c_uint64 * len(counts)
    sizes = words(*counts)
    places = words(*itertools.accumulate([0, *counts[:-1]]))
    pointers = (ctypes.addressof(sizes), ctypes.addressof(places))
    return BufferInfoV(x.address, *pointers, datatype, _memory_type(x)), (sizes, places)


def _is_own(piece: FlatBuffer, chunks: Chunks, rank: int) -> bool:
    """Return whether `piece` is this rank's chunk of the whole."""
    whole, counts = chunks
    return bool(piece.count) and piece.address == whole.slice(sum(counts[:rank]), 0).address
