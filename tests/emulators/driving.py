"""Call the emulators by ctypes, for their own tests, without nc10d's bindings.

    gpu = Gpu(device=0)                       # loads libcuda, makes a context current
    address = gpu.put(x)                      # device memory that holds a copy of x
    nccl = Nccl()
    comm = nccl.init(group)                   # the group's store passes the id on
    nccl("ncclAllReduce", address, address, x.size, FLOAT32, SUM, comm, stream)

A call that returns a nonzero code raises Refused, with the code.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from build import Libraries, build
from nc10d.group.process_group import ProcessGroup

Array = np.ndarray[Any, np.dtype[Any]]
INTS = ["int8", "uint8", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
TYPES = {label: code for code, label in enumerate([*INTS, *FLOATS])}
NON_BLOCKING = 1
DISABLE_TIMING = 2
_ids = itertools.count()  # numbers the ids of this process, so that each has a key of its own
IN_PROGRESS = 7


class Refused(Exception):
    """A call returned the code `code`."""

    def __init__(self, name: str, code: int, words: str = "") -> None:
        super().__init__(f"{name} returned {code} {words}")
        self.code = code


def libraries() -> Libraries:
    """Return the emulators; raise AssertionError if they can't be built."""
    found = build()
    assert found is not None, "no gcc, or no headers"
    return found


class Gpu:
    """Calls libcuda: `gpu("cuStreamQuery", stream)`; with helpers that tests often need."""

    def __init__(self, device: int = 0) -> None:
        self._lookup = ctypes.CDLL(str(libraries().cuda)).cuGetProcAddress_v2
        self._found: dict[str, Any] = {}
        self("cuInit", 0)
        self._context = self.out("cuDevicePrimaryCtxRetain", device)
        self.enter()

    def enter(self) -> Gpu:
        """Make the device current in the calling thread."""
        self("cuCtxSetCurrent", self._context)
        return self

    def __call__(self, name: str, *args: Any) -> None:
        function = self._found.get(name) or self._find(name)
        code = function(*map(_wide, args))
        if code:
            raise Refused(name, code)

    def _find(self, name: str) -> Any:
        """Look a function up by its documented name, as programs do."""
        address, status = ctypes.c_void_p(), ctypes.c_int()
        wanted = ctypes.byref(address), 12090, ctypes.c_uint64(0), ctypes.byref(status)
        code = self._lookup(name.encode(), *wanted)
        if code:
            raise Refused(f"cuGetProcAddress({name})", code)
        self._found[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)
        return self._found[name]

    def out(self, name: str, *args: Any) -> int:
        """Call with a pointer to 8 bytes as the first argument; return their value afterwards."""
        result = ctypes.c_uint64()
        self(name, ctypes.byref(result), *args)
        return result.value

    def code(self, name: str, *args: Any) -> int:
        """Make a call that may be refused; return its code."""
        try:
            self(name, *args)
        except Refused as error:
            return error.code
        return 0

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.out("cuStreamCreate", flags)

    def event(self, flags: int = DISABLE_TIMING) -> int:
        return self.out("cuEventCreate", flags)

    def end_capture(self, stream: int) -> int:
        """Return the graph that a stream was captured into."""
        graph = ctypes.c_uint64()
        self("cuStreamEndCapture", stream, ctypes.byref(graph))
        return graph.value

    def put(self, x: Array) -> int:
        """Return new device memory with a copy of `x`."""
        address = self.out("cuMemAlloc", max(x.nbytes, 1))
        self("cuMemcpyHtoD", address, x.ctypes.data, x.nbytes)
        return address

    def get(self, address: int, like: Array) -> Array:
        """Return a copy of device memory, with the shape and dtype of `like`."""
        x = np.empty_like(like)
        self("cuMemcpyDtoH", x.ctypes.data, address, x.nbytes)
        return x

    def pinned(self, x: Array) -> tuple[int, Array]:
        """Return pinned memory with a copy of `x`: its address, and an array on it."""
        address = self.out("cuMemHostAlloc", max(x.nbytes, 1), 0)
        room = (ctypes.c_char * x.nbytes).from_address(address)
        view = np.frombuffer(room, np.uint8).view(x.dtype).reshape(x.shape)
        view[...] = x
        return address, view


class Nccl:
    """Calls libnccl: `nccl("ncclCommDestroy", comm)`. Create a Gpu first."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(libraries().nccl))
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        self.library.ncclGetLastError.restype = ctypes.c_char_p

    def __call__(self, name: str, *args: Any) -> None:
        code = self.code(name, *args)
        if code:
            raise Refused(name, code, self.last_error())

    def code(self, name: str, *args: Any) -> int:
        """Make a call that may be refused; return its code."""
        code: int = getattr(self.library, name)(*map(_wide, args))
        return code

    def last_error(self) -> str:
        text: bytes = self.library.ncclGetLastError(None)
        return text.decode()

    def unique_id(self) -> Array:
        found = np.zeros(128, np.uint8)
        self("ncclGetUniqueId", found.ctypes.data)
        return found

    def init(self, group: ProcessGroup, blocking: bool = True) -> int:
        """Make a communicator of all ranks of `group` on the current device."""
        key = f"id {next(_ids)}"
        if group.rank == 0:
            group.store.set(key, self.unique_id().tobytes())
        unique = np.frombuffer(group.store.get(key), np.uint8)
        comm, code = self.init_rank(group.size, unique, group.rank, blocking)
        if code not in (0, IN_PROGRESS):
            raise Refused("ncclCommInitRankConfig", code, self.last_error())
        return comm

    def init_rank(
        self, size: int, unique: Array, rank: int, blocking: bool = True, fields: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Make a communicator; return it and the code. `fields` follow `blocking` in its config."""
        comm = ctypes.c_uint64()
        words = [-0x35014111, 23203, int(blocking), *fields]
        config = (ctypes.c_int32 * (2 + len(words)))(8 + 4 * len(words), 0, *words)
        function = self.library.ncclCommInitRankConfig
        by_value = _Id.from_buffer_copy(unique)
        code = function(ctypes.byref(comm), size, by_value, rank, ctypes.byref(config))
        return comm.value, code

    def split(self, comm: int, color: int, key: int) -> int:
        made = ctypes.c_uint64()
        self("ncclCommSplit", comm, color, key, ctypes.byref(made), None)
        return made.value

    def shrink(self, comm: int, without: list[int], abort: bool) -> int:
        made, ranks = ctypes.c_uint64(), np.array(without, np.int32)
        where = ctypes.byref(made)
        self("ncclCommShrink", comm, ranks.ctypes.data, ranks.size, where, None, int(abort))
        return made.value

    def number(self, name: str, comm: int) -> int:
        """Call a function that returns an int about a communicator; return the int."""
        answer = ctypes.c_int()
        self(name, comm, ctypes.byref(answer))
        return answer.value

    def state(self, comm: int) -> int:
        """Return the asynchronous error of a communicator."""
        return self.number("ncclCommGetAsyncError", comm)

    def words(self, comm: int) -> str:
        """Return a communicator's last error text."""
        text: bytes = self.library.ncclGetLastError(ctypes.c_uint64(comm))
        return text.decode()

    def ready(self, comm: int) -> int:
        """Poll a nonblocking communicator until it is no longer in progress; return its state."""
        while (state := self.state(comm)) == IN_PROGRESS:
            os.sched_yield()
        return state


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def _wide(x: Any) -> Any:
    return ctypes.c_uint64(x & (2**64 - 1)) if isinstance(x, int) else x
