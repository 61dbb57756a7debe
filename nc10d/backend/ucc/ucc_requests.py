"""UCC's collectives on contiguous memory: each call posts one, and returns the request.

Counts and displacements are in elements.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from nc10d.backend.polled.flat_buffers import Chunks, FlatBuffer, is_chunk_of
from nc10d.backend.polled.polled_collectives import CollectiveLibrary
from nc10d.backend.ucc.datatypes import UccReduction, carrier, native
from nc10d.backend.ucc.library import IN_PROGRESS, OK, STATUS
from nc10d.backend.ucc.structs import BufferInfo, BufferInfoV, CollArgs
from nc10d.backend.ucc.team import UccTeam
from nc10d.backend.ucc.ucc_table import ENUMS
from nc10d.errors import UCCError
from nc10d.ops import ReduceOp

_KINDS = ENUMS["ucc_coll_type_t"]
_MASKS = ENUMS["masks"]
_MEMORY = ENUMS["ucc_memory_type_t"]
_WIDE = _MASKS["UCC_COLL_ARGS_FLAG_COUNT_64BIT"] | _MASKS["UCC_COLL_ARGS_FLAG_DISPLACEMENTS_64BIT"]
_IN_PLACE = _MASKS["UCC_COLL_ARGS_FLAG_IN_PLACE"]


class UccRequest:
    """A collective that has been posted; keeps the arguments alive that UCC points at."""

    __slots__ = ("_args", "_handle", "_kept", "_name", "_team")

    def __init__(self, team: UccTeam, name: str, args: Any, kept: object) -> None:
        """Post a collective; UCCError, and nothing is in flight, if UCC refuses."""
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
        """Return whether the collective has ended; UCCError after a failure. Never blocks."""
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


class UccCalls(CollectiveLibrary):
    """A team as a CollectiveLibrary, whose methods have the documentation.

    With `any_order`, UCC's own algorithms may choose the order of sums.
    """

    def __init__(self, team: UccTeam, any_order: bool) -> None:
        self.rank, self.size = team.rank, team.size
        self._team = team
        self._any_order = any_order

    def reduction(
        self, op: ReduceOp, x: FlatBuffer, scattered: bool = False
    ) -> UccReduction | None:
        """Return UCC's reduction; TypeError for one of device arrays that UCC lacks."""
        return native(op, x, self.size, self._any_order)

    def all_reduce(self, x: FlatBuffer, how: UccReduction) -> UccRequest:
        """Post UCC's allreduce."""
        return self._post("ALLREDUCE", None, _reduced(x, how), in_place=True, op=how.op)

    def reduce(self, x: FlatBuffer, how: UccReduction, root: int) -> UccRequest:
        """Post UCC's reduce."""
        info, is_root = _reduced(x, how), self.rank == root
        src, dst = (None, info) if is_root else (info, None)
        return self._post("REDUCE", src, dst, in_place=is_root, op=how.op, root=root)

    def reduce_scatter(self, out: FlatBuffer, inp: Chunks, how: UccReduction) -> UccRequest:
        """Post UCC's reduce_scatter or reduce_scatterv."""
        whole, counts = inp
        even = len(set(counts)) == 1
        wide = [n * how.width for n in counts]
        dst = _reduced(out, how) if even else _vector(out, wide, how.datatype)
        return self._post("REDUCE_SCATTER", _reduced(whole, how), dst, even, op=how.op)

    def broadcast(self, x: FlatBuffer, root: int) -> UccRequest:
        """Post UCC's bcast."""
        return self._post("BCAST", _moved(x), None, root=root)

    def all_gather(self, out: Chunks, inp: FlatBuffer) -> UccRequest:
        """Post UCC's allgather or allgatherv."""
        even, src = len(set(out[1])) == 1, self._unless_in_place(inp, out)
        return self._post("ALLGATHER", src, _in_chunks(out, even), even, in_place=src is None)

    def all_to_all(self, out: Chunks, inp: Chunks, even: bool) -> UccRequest:
        """Post UCC's alltoall or alltoallv."""
        return self._post("ALLTOALL", _in_chunks(inp, even), _in_chunks(out, even), even)

    def gather(self, out: Chunks | None, inp: FlatBuffer, root: int, even: bool) -> UccRequest:
        """Post UCC's gather or gatherv."""
        src, dst = self._unless_in_place(inp, out), _in_chunks(out, even)
        return self._post("GATHER", src, dst, even, in_place=src is None, root=root)

    def scatter(self, out: FlatBuffer, inp: Chunks | None, root: int, even: bool) -> UccRequest:
        """Post UCC's scatter or scatterv."""
        if even:
            # UCP, UCC 1.8's transport on the host, has only scatterv: on every rank alike.
            try:
                return self._scatter(out, inp, root, even=True)
            except UCCError as error:
                if error.code != STATUS["UCC_ERR_NOT_SUPPORTED"]:
                    raise
        return self._scatter(out, inp, root, even=False)

    def _scatter(self, out: FlatBuffer, inp: Chunks | None, root: int, even: bool) -> UccRequest:
        src, dst = _in_chunks(inp, even), self._unless_in_place(out, inp)
        return self._post("SCATTER", src, dst, even, in_place=dst is None, root=root)

    def _unless_in_place(self, piece: FlatBuffer, chunks: Chunks | None) -> object:
        """Describe `piece` for UCC: None for this rank's chunk of the other array."""
        return None if is_chunk_of(piece, chunks, self.rank) else _moved(piece)

    def _post(
        self,
        kind: str,
        src: Any,
        dst: Any,
        even: bool = True,
        *,
        in_place: bool = False,
        op: int = 0,
        root: int = 0,
    ) -> UccRequest:
        """Post a collective: unless `even`, in the form for chunks of any size."""
        vectors = any(isinstance(info, BufferInfoV) for info in (src, dst))
        flags = (_WIDE if vectors else 0) | (_IN_PLACE if in_place else 0)
        name = kind if even else f"{kind}V"
        args = CollArgs(
            mask=_MASKS["UCC_COLL_ARGS_FIELD_FLAGS"] if flags else 0,
            coll_type=_KINDS[f"UCC_COLL_TYPE_{name}"],
            op=op,
            flags=flags,
            root=root,
        )
        for field, info in (("src", src), ("dst", dst)):
            if info is not None:  # either form of a union
                place = ctypes.addressof(args) + getattr(CollArgs, field).offset
                ctypes.memmove(place, ctypes.byref(info), ctypes.sizeof(info))
        return UccRequest(self._team, f"UCC's {name.lower()}", args, (src, dst))


def _memory_type(x: FlatBuffer) -> int:
    return _MEMORY[f"UCC_MEMORY_TYPE_{'HOST' if x.device == 'cpu' else x.device.upper()}"]


def _moved(x: FlatBuffer) -> object:
    datatype, width = carrier(x.dtype)
    return BufferInfo(x.address, x.count * width, datatype, _memory_type(x))


def _reduced(x: FlatBuffer, how: UccReduction) -> Any:
    return BufferInfo(x.address, x.count * how.width, how.datatype, _memory_type(x))


def _in_chunks(chunks: Chunks | None, even: bool) -> object:
    """Describe a buffer in chunks for UCC."""
    if chunks is None:
        return None
    x, counts = chunks
    datatype, width = carrier(x.dtype)
    return _moved(x) if even else _vector(x, [n * width for n in counts], datatype)


def _vector(x: FlatBuffer, counts: Sequence[int], datatype: int) -> Any:
    """Describe a buffer in chunks of any size; the description keeps the arrays it points at."""
    words = ctypes.c_uint64 * len(counts)
    sizes = words(*counts)
    places = words(*itertools.accumulate([0, *counts[:-1]]))
    pointers = (ctypes.addressof(sizes), ctypes.addressof(places))
    info = BufferInfoV(x.address, *pointers, datatype, _memory_type(x))
    info.kept = sizes, places
    return info
