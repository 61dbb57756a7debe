"""A UCC context, which groups share, and a UCC team, which each group has.

The ranks have met before either is made. UCC makes a context in a call that blocks; the exchanges
in the call fail at the deadline, so the call returns. A team is made by polling.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

from nc10d.backend.ucc.library import API_VERSION, IN_PROGRESS, UccLibrary
from nc10d.backend.ucc.store_exchange import StoreExchange
from nc10d.backend.ucc.structs import ContextParams, LibParams, TeamParams
from nc10d.backend.ucc.ucc_table import ENUMS
from nc10d.base.deadline import Deadline
from nc10d.errors import RendezvousError, UCCError
from nc10d.store.base import Store

_MASKS = ENUMS["masks"]
_CLOSE_SECONDS = 5.0
"""How long a context's end waits for the other ranks' ends."""

Check = Callable[[], None]
"""Raises the reason to stop waiting for other ranks, if there is any."""


class UccContext:
    """A process's end of the connections between the ranks of a job's first group."""

    def __init__(
        self,
        library: UccLibrary,
        store: Store,
        rank: int,
        size: int,
        deadline: Deadline,
        check: Check,
    ) -> None:
        """Make the context; blocks until all ranks do."""
        self.library = library
        self._users = 0
        self._exchange = StoreExchange(store, rank, size, deadline, check)
        self._lib = self._initialised()
        try:
            self.handle = self._made()
        except BaseException:
            library.function("ucc_finalize")(self._lib)
            raise

    def _initialised(self) -> int:
        mode = ENUMS["ucc_thread_mode_t"]["UCC_THREAD_MULTIPLE"]
        params = LibParams(mask=_MASKS["UCC_LIB_PARAM_FIELD_THREAD_MODE"], thread_mode=mode)
        with self._config("ucc_lib_config", None, None) as config:
            return self._out("ucc_init_version", *API_VERSION, ctypes.byref(params), config)

    def _made(self) -> int:
        params = ContextParams(mask=_MASKS["UCC_CONTEXT_PARAM_FIELD_OOB"])
        params.oob = self._exchange.struct
        with self._config("ucc_context_config", self._lib, None) as config, raising(self._exchange):
            return self._out("ucc_context_create", self._lib, ctypes.byref(params), config)

    @contextlib.contextmanager
    def _config(self, kind: str, *arguments: object) -> Iterator[int]:
        """Read a configuration from the environment (UCC_...); release it after the block."""
        config = self._out(f"{kind}_read", *arguments)
        try:
            yield config
        finally:
            self.library.function(f"{kind}_release")(config)

    def _out(self, name: str, *arguments: object) -> int:
        """Call a function whose last argument is a pointer to a handle; return the handle."""
        handle = ctypes.c_void_p()
        self.library.call(name, *arguments, ctypes.byref(handle))
        return handle.value or 0

    def progress(self) -> None:
        """Advance everything that is in flight; never blocks."""
        self.library.call("ucc_context_progress", self.handle)

    def enter(self) -> None:
        """Count a team that is going to use the context."""
        self._users += 1

    def leave(self) -> None:
        """Count a team that has left the context."""
        self._users -= 1

    def end(self) -> None:
        """Destroy the context if all teams have left; waits a while for the other ranks."""
        if self._users:
            return
        handle, self.handle = self.handle, 0
        if not handle:  # the context has ended before
            return
        self._exchange.deadline = Deadline.after(_CLOSE_SECONDS)
        with contextlib.suppress(UCCError):  # a rank that has died does not come
            self.library.call("ucc_context_destroy", handle)
            self.library.call("ucc_finalize", self._lib)


class UccTeam:
    """A group's ranks in UCC; `handle` is the ucc_team_h."""

    def __init__(
        self,
        context: UccContext,
        store: Store,
        rank: int,
        size: int,
        deadline: Deadline,
        check: Check,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        """Make the team; blocks until all ranks do. UCC is only called under `lock`."""
        self.context, self.rank, self.size = context, rank, size
        self._exchange = StoreExchange(store, rank, size, deadline, check)
        fields = ("EP", "EP_RANGE", "TEAM_SIZE", "OOB")
        params = TeamParams(
            mask=sum(_MASKS[f"UCC_TEAM_PARAM_FIELD_{field}"] for field in fields),
            ep=rank,
            ep_range=_MASKS["UCC_COLLECTIVE_EP_RANGE_CONTIG"],
            team_size=size,
        )
        params.oob = self._exchange.struct
        made, contexts = ctypes.c_void_p(), ctypes.c_void_p(context.handle)
        where = ctypes.byref(params), ctypes.byref(made)
        call = context.library.call
        with raising(self._exchange):
            with lock:
                call("ucc_team_create_post", ctypes.byref(contexts), 1, *where)
            self.handle = made.value or 0
            while self._forming(lock):
                check()
                if deadline.expired():
                    raise RendezvousError(f"UCC: the team of {size} ranks has not formed in time")
                os.sched_yield()
        context.enter()

    def _forming(self, lock: contextlib.AbstractContextManager[object]) -> bool:
        with lock:
            self.context.progress()
            return self.context.library.call("ucc_team_create_test", self.handle) == IN_PROGRESS

    def destroyed(self) -> bool:
        """Go on destroying the team, without blocking; return whether that has ended."""
        if self.handle:
            self.context.progress()
            if self.context.library.call("ucc_team_destroy", self.handle) == IN_PROGRESS:
                return False
            self.handle = 0
            self.context.leave()
        return True


@contextlib.contextmanager
def raising(exchange: StoreExchange) -> Iterator[None]:
    """Raise an exchange's own error where UCC's call fails because of it."""
    try:
        yield
    except UCCError as error:
        if exchange.error is None:
            raise
        raise exchange.error from error
