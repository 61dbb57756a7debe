"""UCC's out-of-band exchange: all ranks of a context or a team show each other bytes in the store.

UCC calls three functions (ucc_oob_coll_t). `allgather` begins an exchange, `req_test` asks if the
exchange has ended, `req_free` frees the request. None blocks. An exchange fails at the deadline, or
if `check` raises; UCC's own call then fails, and the caller raises `error`.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

from nc10d.backend.ucc.library import IN_PROGRESS, OK, STATUS
from nc10d.backend.ucc.structs import CALLBACK_TYPES, OobColl
from nc10d.base.deadline import Deadline
from nc10d.errors import RendezvousError
from nc10d.store.base import Store

_FAILED = STATUS["UCC_ERR_NO_MESSAGE"]


class StoreExchange:
    """The exchanges of a context or a team; `struct` describes them to UCC."""

    def __init__(
        self, store: Store, rank: int, size: int, deadline: Deadline, check: Callable[[], None]
    ) -> None:
        self.deadline = deadline
        self.error: BaseException | None = None
        self._store, self._rank, self._size, self._check = store, rank, size, check
        self._numbers = itertools.count(1)
        self._receiving: dict[int, tuple[list[str], int, int]] = {}
        functions = {
            "allgather": self._guarded(self._begin),
            "req_test": self._guarded(self._test),
            "req_free": self._guarded(self._free),
        }
        # Called for as long as the context or the team exists.
        self._callbacks = {name: CALLBACK_TYPES[name](f) for name, f in functions.items()}
        addresses = {
            name: ctypes.cast(f, ctypes.c_void_p).value for name, f in self._callbacks.items()
        }
        self.struct = OobColl(coll_info=None, n_oob_eps=size, oob_ep=rank, **addresses)

    def _guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        """Return a function for C that keeps an error, and returns a failed status."""

        def call(*arguments: object) -> int:
            try:
                return function(*arguments)
            except BaseException as error:  # noqa: BLE001  (no exception may pass through C)
                self.error = self.error or error
                return _FAILED

        return call

    def _begin(self, sent: int, received: int, nbytes: int, info: int, request: int) -> int:
        number = next(self._numbers)
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], ctypes.string_at(sent, nbytes))
        self._receiving[number] = keys, received, nbytes
        ctypes.c_void_p.from_address(request).value = number
        return OK

    def _test(self, request: int) -> int:
        found = self._receiving.get(request)
        if found is None:  # asked again after the end
            return OK
        keys, received, nbytes = found
        if not self._store.check(keys):
            self._check()
            if self.deadline.expired():
                raise RendezvousError(f"UCC: {self._missing(keys)} within the timeout")
            return IN_PROGRESS
        for rank, value in enumerate(self._store.multi_get(keys)):
            if len(value) != nbytes:
                text = f"UCC: rank {rank} shows {len(value)} bytes, and this rank {nbytes}"
                raise RendezvousError(text, rank=rank)
            ctypes.memmove(received + rank * nbytes, value, nbytes)
        del self._receiving[request]
        return OK

    def _missing(self, keys: list[str]) -> str:
        absent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        return f"rank {', '.join(absent)} did not come to exchange {keys[0].partition('/')[0]}"

    def _free(self, request: int) -> int:
        self._receiving.pop(request, None)
        return OK
