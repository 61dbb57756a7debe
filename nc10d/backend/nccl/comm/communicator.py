"""NCCL's communicator as an object: made within a deadline, used under its lock, ended once.

All ranks call `Communicator.create` with the same unique id, after all have arrived (see
comm_streams): NCCL itself waits for a missing rank for ever. So a blocking init runs on its own
thread, which is abandoned at the deadline; a nonblocking init is polled.

A single thread at a time may be in NCCL with a communicator: every call holds its `lock`. Only
`abort` goes ahead without the lock, because an abort has to free a thread that is stuck.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from nc10d.backend.nccl.bindings.header_table import CONSTANTS, ENUMS
from nc10d.backend.nccl.bindings.library import IN_PROGRESS, Library, UniqueId
from nc10d.backend.nccl.comm.options import NCCLConfig, as_struct
from nc10d.base.deadline import NEVER, Deadline
from nc10d.base.signal_errors import Event, Thread
from nc10d.base.text import in_seconds
from nc10d.errors import CollectiveTimeout, DistError, GroupClosed, UnsupportedPlatform

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005  # seconds between polls, if nonblocking
_SLICE = 0.2  # seconds between looks at the group while a blocking call waits for all ranks
UNTIL_ABORT_ANYWAY = 1.0
"""Seconds that an abort waits for a thread that is in NCCL."""
MOST_OPERATORS = 16
"""Operators of PREMUL_SUM that a communicator keeps: a dynamic loss scale has ever new factors."""
_GROUPED_ABORT = (2, 22, 0)
"""The release from which NCCL groups aborts."""
_no_event = Event()

OnDevice = Callable[[], AbstractContextManager[None]]
"""Makes the communicator's device current in the calling thread."""


class Communicator:
    """One rank's end of a communicator. Methods raise NCCLError; GroupClosed once it has ended."""

    def __init__(self, library: Library, handle: int, enter: OnDevice, blocking: bool) -> None:
        """Own a handle from NCCL, whose init may still be in progress if not `blocking`."""
        self.library = library
        self.blocking = blocking
        self.lock = threading.RLock()
        self.enter = enter
        self._handle: int | None = handle
        self._premul_ops: dict[tuple[str, int], PremulOperator] = {}

    @classmethod
    def create(
        cls,
        library: Library,
        unique_id: bytes,
        rank: int,
        size: int,
        deadline: Deadline,
        enter: OnDevice,
        config: NCCLConfig | None = None,
    ) -> Communicator:
        """Make rank `rank` of `size`; blocks until all ranks call, or raises CollectiveTimeout."""
        given = UniqueId.from_buffer_copy(unique_id)

        def make(made: Any, how: Any) -> None:
            library.call("ncclCommInitRankConfig", made, size, given, rank, how)

        return cls._made(library, size, make, deadline, enter, config)

    @classmethod
    def grown(
        cls,
        library: Library,
        unique_id: bytes,
        rank: int,
        size: int,
        deadline: Deadline,
        enter: OnDevice,
        config: NCCLConfig | None,
        parent: Communicator | None,
    ) -> Communicator:
        """Make rank `rank` in a communicator with new ranks beside those of `parent` (2.29.2).

        Rank 0 has made the id by its parent's `growth_id`. The parent's ranks keep their numbers;
        a new rank has no parent. Nothing is in flight on the parent, which can be closed then.
        """
        given = UniqueId.from_buffer_copy(unique_id)
        shown = None if parent is not None and rank else ctypes.byref(given)

        def make(made: Any, how: Any) -> None:
            with parent.lock if parent is not None else contextlib.nullcontext():
                old = (parent.handle, size, shown, -1) if parent else (None, size, shown, rank)
                library.call("ncclCommGrow", *old, made, how)

        return cls._made(library, size, make, deadline, enter, config)

    def split(
        self,
        color: int,
        key: int,
        deadline: Deadline,
        config: NCCLConfig,
        check: Callable[[], None],
    ) -> Communicator:
        """Make a communicator of the ranks with the same color, in the order of their keys.

        All ranks call, and have met before. Nothing is in flight. `check` is called meanwhile.
        """
        made = ctypes.c_void_p()
        place = ctypes.byref(made), ctypes.byref(as_struct(config, self.library))
        # NCCL sets the new handle as late as this communicator takes calls again (its init.cc,
        # ncclCommInitRankFunc). By then both are ready.
        self.call_with_all("ncclCommSplit", deadline, color, key, *place, check=check)
        return Communicator(self.library, int(made.value or 0), self.enter, config.blocking != 0)

    def growth_id(self) -> bytes:
        """Return the id by which new ranks join; one rank calls, once for each growth."""
        made = UniqueId()
        self.call("ncclCommGetUniqueId", ctypes.byref(made))
        return bytes(made)

    @classmethod
    def _made(
        cls,
        library: Library,
        size: int,
        make: Callable[[Any, Any], None],
        deadline: Deadline,
        enter: OnDevice,
        config: NCCLConfig | None,
    ) -> Communicator:
        config = config or NCCLConfig()
        blocking = config.blocking is None or bool(config.blocking)
        struct = as_struct(config, library)
        comm = ctypes.c_void_p()

        def begin() -> None:
            with enter():
                make(ctypes.byref(comm), ctypes.byref(struct))

        call_name = f"making a communicator of {size} ranks"
        if blocking:
            _within(deadline, call_name, begin)
        else:
            begin()
        made = cls(library, int(comm.value or 0), enter, blocking)
        made.settle(deadline, call_name)
        return made

    def call_with_all(
        self,
        name: str,
        deadline: Deadline,
        *arguments: object,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a call that waits for the same call on all ranks, which have met before.

        CollectiveTimeout at the deadline. `check` is called meanwhile, and may raise.
        """
        with self.lock if not self.blocking else contextlib.nullcontext():
            if self.blocking:
                _within(deadline, name, lambda: self.call(name, *arguments), check)
            else:
                self.call(name, *arguments)
            self.settle(deadline, name, check)

    @property
    def handle(self) -> int:
        """The ncclComm_t, for calls; GroupClosed once it has ended."""
        if self._handle is None:
            raise GroupClosed("the NCCL communicator has ended")
        return self._handle

    @property
    def alive(self) -> bool:
        """Whether the communicator has not ended yet."""
        return self._handle is not None

    def call(self, name: str, *arguments: object) -> int:
        """Call a function whose first argument is the communicator."""
        with self.lock, self.enter():
            return self.library.call(name, self.handle, *arguments)

    def async_error(self) -> int:
        """Return the ncclResult_t for asynchronous work: SUCCESS, IN_PROGRESS, or an error."""
        state = ctypes.c_int()
        self.call("ncclCommGetAsyncError", ctypes.byref(state))
        return state.value

    def settle(
        self, deadline: Deadline, call_name: str, check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until a nonblocking communicator takes calls again; CollectiveTimeout if late."""
        # Raises NCCLError if asynchronous work has failed.
        pause = _FIRST_PAUSE
        while not self.blocking:
            state = self.async_error()
            self.library.check(state, call_name)
            if state != IN_PROGRESS:
                return
            check()
            if deadline.expired():
                self.abort()
                raise CollectiveTimeout(
                    f"{call_name} timed out after {in_seconds(deadline.limit)}", op=call_name
                )
            _no_event.wait(pause)  # NCCL can't wake a thread
            pause = min(2 * pause, _LONGEST_PAUSE)

    def premul_sum(self, factor: float, datatype: int, scalar: Any) -> PremulOperator:
        """Return the operator that multiplies by `factor`, which `scalar` holds as a C value."""
        # Made once for each factor and type; the one that was asked for last comes last.
        key = factor.hex(), datatype  # -0.0 equals 0.0
        found = self._premul_ops.pop(key, None)
        if found is None:
            made = ctypes.c_int()
            pointer, here = ctypes.byref(scalar), 1  # ncclScalarHostImmediate
            with self.lock, self.enter():
                self.library.call(
                    "ncclRedOpCreatePreMulSum",
                    *(ctypes.byref(made), pointer, datatype, here, self.handle),
                )
            found = PremulOperator(made.value)
        self._premul_ops[key] = found
        return found

    def drop_operators(self) -> None:
        """Destroy the operators that were asked for first, all but MOST_OPERATORS."""
        # NCCL allows that when the last call with an operator has returned (nccl.h). Launches that
        # would make such calls again are made anew; a graph has NCCL's kernels with the factors.
        while len(self._premul_ops) > MOST_OPERATORS:
            dropped = self._premul_ops.pop(next(iter(self._premul_ops)))
            for user in dropped.users:
                user.invalidate()
            with self.lock, self.enter():
                self.library.call("ncclRedOpDestroy", dropped.handle, self.handle)

    def register(self, address: int, nbytes: int) -> Registration:
        """Register memory for zero-copy operations (NCCL 2.19); close it before memory is freed."""
        made = ctypes.c_void_p()
        self.call("ncclCommRegister", address, nbytes, ctypes.byref(made))
        return Registration(self, int(made.value or 0))

    def window(self, address: int, nbytes: int, deadline: Deadline) -> Registration:
        """Register memory as a window of all ranks, which have met before (NCCL 2.27).

        UnsupportedPlatform on all ranks if the machine has no symmetric memory.
        """
        made = ctypes.c_void_p()
        symmetric = CONSTANTS["NCCL_WIN_COLL_SYMMETRIC"]
        place = ctypes.byref(made)
        self.call_with_all("ncclCommWindowRegister", deadline, address, nbytes, place, symmetric)
        if not made.value:  # NCCL's answer where a communicator lacks symmetric memory
            raise UnsupportedPlatform(
                "NCCL has no symmetric memory between these ranks: it needs devices that reach "
                "each other's memory (NVLink or PCIe peer access), and NCCL_CUMEM_ENABLE"
            )
        return Registration(self, made.value, "ncclCommWindowDeregister")

    def memory_stat(self, which: str) -> int:
        """Return a statistic, a name of ncclCommMemStat_t, in bytes (NCCL 2.29.7)."""
        value = ctypes.c_uint64()
        self.call("ncclCommMemStats", ENUMS["ncclCommMemStat_t"][which], ctypes.byref(value))
        return value.value

    def close(self) -> None:
        """Destroy it after its operations have ended; idempotent.

        Blocks until all its ranks on this node have called or have ended (NCCL's proxy.cc).
        """
        handle = self._taken(NEVER)
        if handle is not None:
            with self.enter():
                self.library.function("ncclCommDestroy")(handle)

    def abort(self) -> None:
        """Destroy the communicator now, aborting its operations; idempotent, from any thread."""
        abort_all([self])

    def _taken(self, deadline: Deadline) -> int | None:
        """Take the handle, after which no thread enters NCCL; waits for one inside until then."""
        owned = self.lock.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX))
        handle, self._handle = self._handle, None
        if owned:
            self.lock.release()
        return handle


def abort_all(communicators: Sequence[Communicator]) -> None:
    """Abort communicators of one device at once; blocks until NCCL has freed their memory."""
    # Freeing waits for every kernel on the device. So no abort returns while another of these
    # communicators has a kernel that spins (pytorch's PR 150690); an abort first stops its own.
    # Waits at most a second for threads that are inside NCCL: if a thread is stuck, only the abort
    # frees it.
    deadline = Deadline.after(UNTIL_ABORT_ANYWAY)
    taken = [(comm, comm._taken(deadline)) for comm in communicators]
    aborts = [partial(_abort, comm, handle) for comm, handle in taken if handle is not None]
    if not aborts:
        return
    library = communicators[0].library
    if library.version >= _GROUPED_ABORT:
        library.function("ncclGroupStart")()
        try:
            for abort in aborts:
                abort()
        finally:
            library.function("ncclGroupEnd")()
        return
    threads = [Thread(target=abort, name="nc10d-nccl-abort", daemon=True) for abort in aborts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(comm: Communicator, handle: int) -> None:
    with comm.enter():
        comm.library.function("ncclCommAbort")(handle)


class UsesOperators(Protocol):
    """A table of calls with operators."""

    def invalidate(self) -> None:
        """Make the calls no more: an operator is gone."""


class PremulOperator:
    """An ncclRedOp_t for one factor and type, and the tables that have it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.users: weakref.WeakSet[UsesOperators] = weakref.WeakSet()


class Registration:
    """Memory that is registered with a communicator, until `close`."""

    def __init__(
        self, communicator: Communicator, handle: int, undo: str = "ncclCommDeregister"
    ) -> None:
        self._communicator = communicator
        self._undo = undo
        self.handle: int | None = handle

    def close(self) -> None:
        """Deregister; idempotent. The communicator's end deregisters too."""
        handle, self.handle = self.handle, None
        if handle is not None and self._communicator.alive:
            self._communicator.call(self._undo, handle)


def mem_alloc(library: Library, nbytes: int) -> int:
    """Return the address of memory on the current device that NCCL can register (2.19)."""
    made = ctypes.c_void_p()
    library.call("ncclMemAlloc", ctypes.byref(made), nbytes)
    return int(made.value or 0)


def mem_free(library: Library, address: int) -> None:
    """Free memory from `mem_alloc`."""
    library.call("ncclMemFree", address)


def _within(
    deadline: Deadline,
    call_name: str,
    function: Callable[[], object],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run a function that blocks in NCCL on a thread that is abandoned at the deadline."""
    failures: list[DistError] = []

    def run() -> None:
        try:
            function()
        except DistError as error:
            failures.append(error)

    thread = Thread(target=run, name="nc10d-nccl-init", daemon=True)
    thread.start()
    while thread.is_alive() and not deadline.expired():
        check()
        thread.join(deadline.slice(_SLICE))
    if thread.is_alive():
        message = (
            f"{call_name} timed out after {in_seconds(deadline.limit)}: a rank died meanwhile, or "
            "can't be reached"
        )
        raise CollectiveTimeout(message, op=call_name)
    if failures:
        raise failures[0]
