"""One client's calls to a server: turns between threads, deadlines, and what failures mean.

A call sends one packet and reads one reply. On a timeout a wait is taken back (CANCEL_WAIT); where
the server does not answer that at once, or where any other reply is still to come, the connection
is dropped and the next call makes a new one. A forked child drops its copy of the parent's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from nc10d.base.deadline import Timeout, seconds
from nc10d.errors import StoreError, StoreTimeout
from nc10d.store import wire as m
from nc10d.store.client_connect import connect, connect_once
from nc10d.store.connection import StoreConnection
from nc10d.store.store_errors import NotAStore, why_gone, why_unreached

T = TypeVar("T")
monotonic = time.monotonic
_CANCEL_GRACE = 0.05
_NAMED_KEYS = 8
_LONGEST_SHOWN = 200


class StoreSession:
    """Calls the server at `host` and `port`; `name` is what errors call the store."""

    def __init__(
        self, host: str, port: int, limit: float, name: str, token: bytes | None = None
    ) -> None:
        self.seconds = limit
        self.name = name
        self._token = token
        self.host, self.port = host, port
        # Who can't have taken it can't release it: what is left behind by Ctrl-C is found so.
        self._lock = threading.RLock()
        self._holder = 0
        self._link: StoreConnection | None = None
        self._closed = False
        _callers.add(self)

    def connect(self, deadline: float) -> None:
        """Connect, to a server that may not be up yet; StoreTimeout if it isn't by `deadline`.

        StoreError at once if something else than a store answers.
        """
        try:
            self._link = connect(self.host, self.port, deadline, self._token)
        except NotAStore as error:
            raise StoreError(f"{self.name}: cannot connect: {why_unreached(error)}") from error
        except OSError as error:
            raise StoreTimeout(
                f"{self.name}: cannot connect, tried for {self.seconds:g} s: {why_unreached(error)}"
            ) from error

    def close(self) -> None:
        """Close the connection; idempotent. Later calls, and one under way, are StoreErrors."""
        self._closed = True
        if self._holder != threading.get_ident() and self._lock.acquire(False):
            try:
                self._drop()
            finally:
                self._lock.release()
        elif (link := self._link) is not None:
            # Its descriptor's number may be another's as soon as it is closed: that is for the
            # thread that is using it.
            link.shut()

    def call(
        self,
        packet: bytes,
        take: Callable[[StoreConnection], T],
        keys: Sequence[str],
        timeout: Timeout = None,
        waits: bool = False,
    ) -> T:
        """Send `packet` and return what `take` makes of the reply, in this thread's turn.

        `keys` are named in errors. `waits` says that the packet begins with a wait, which can be
        taken back.
        """
        limit = self.seconds if timeout is None else seconds(timeout)
        deadline = monotonic() + limit

        def ask(link: StoreConnection) -> T:
            link.deadline, link.waits = deadline, waits
            link.send(packet)
            return take(link)

        return self._in_turn(ask, deadline, limit, keys)

    def tell(self, packet: bytes, keys: Sequence[str]) -> None:
        """Send `packet`, which has no answer: else as `call`."""
        limit = self.seconds
        self._in_turn(lambda link: link.post(packet, limit), monotonic() + limit, limit, keys)

    def _in_turn(
        self,
        act: Callable[[StoreConnection], T],
        deadline: float,
        limit: float,
        keys: Sequence[str],
    ) -> T:
        self._take_turn(deadline, limit, keys)
        try:
            self._holder = threading.get_ident()
            return act(self._link or self._reconnect(deadline))
        except OSError as error:
            raise self._failure(error, limit, keys) from error
        except BaseException:
            self._drop()  # interrupted: the reply is still to come
            raise
        finally:  # no call before the release: Ctrl-C may come as it begins
            self._holder = 0
            self._lock.release()
            if self._closed:  # meanwhile: what was left to this thread
                self.close()

    def _failure(self, error: OSError, limit: float, keys: Sequence[str]) -> StoreError:
        """Leave the connection so that the next call can use it; return what the user is told."""
        if isinstance(error, TimeoutError):
            self._take_back()
            return self._late(limit, keys)
        self._drop()
        why = "it was closed on this rank" if self._closed else why_gone(error)
        return StoreError(f"{self.name}{_named(keys)}: {why}")

    def wait_then(
        self,
        packet: bytes,
        take: Callable[[StoreConnection], T],
        keys: Sequence[str],
        names: list[bytes],
        take_both: Callable[[StoreConnection], T] | None = None,
    ) -> T:
        """Wait for keys, then ask: in one packet where the server holds what is behind a wait.

        `take_both` takes the end of the wait and what `take` does.
        """
        wait = m.with_keys(m.WAIT, names)
        link = self._link
        if link is not None and link.holds_requests:
            return self.call(wait + packet, take_both or _stop_then(take), keys, None, True)
        end = time.monotonic() + self.seconds
        self.call(wait, StoreConnection.take_stop, keys, None, True)
        return self.call(packet, take, keys, max(0.0, end - time.monotonic()))

    def _take_turn(self, deadline: float, limit: float, keys: Sequence[str]) -> None:
        if self._holder == threading.get_ident():
            why = "it was called amid a call of the same thread, as by a signal's handler"
            raise StoreError(f"{self.name}{_named(keys)}: {why}")
        try:
            if self._lock.acquire(False):
                return
            left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            if not self._lock.acquire(timeout=left):
                raise self._late(limit, keys, "; another thread's call was under way")
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it was not taken
                self._lock.release()
            raise

    def _reconnect(self, deadline: float) -> StoreConnection:
        if self._closed:
            raise StoreError(f"{self.name} is closed on this rank")
        self._link = connect_once(self.host, self.port, deadline, self._token)
        return self._link

    def _take_back(self) -> None:
        """Bring the stream back into step after a timeout, or drop it: if interrupted, too."""
        link, self._link = self._link, None
        if link is None:
            return
        try:
            if link.waits and link.cancel_wait(_CANCEL_GRACE):
                self._link = link
        except OSError:
            pass  # it is dropped
        finally:
            if self._link is None:
                link.close()

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _late(self, limit: float, keys: Sequence[str], why: str = "") -> StoreTimeout:
        return StoreTimeout(f"{self.name}{_named(keys)}: no answer within {limit:g} s{why}")

    def after_fork(self) -> None:
        """In a forked child: leave the parent's connection to the parent."""
        self._lock, self._holder = threading.RLock(), 0
        self._drop()


_callers: weakref.WeakSet[StoreSession] = weakref.WeakSet()


def _after_fork() -> None:
    for caller in [*_callers]:
        caller.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _named(keys: Sequence[str]) -> str:
    if not keys:
        return ""
    shown = ", ".join(map(_shown, keys[:_NAMED_KEYS]))
    more = f", and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
    return f", key{'s' if len(keys) > 1 else ''} {shown}{more}"


def _shown(key: str) -> str:
    return repr(key if len(key) <= _LONGEST_SHOWN else key[:_LONGEST_SHOWN] + "...")


def _stop_then(take: Callable[[StoreConnection], T]) -> Callable[[StoreConnection], T]:
    def take_both(link: StoreConnection) -> T:
        link.take_stop()
        return take(link)

    return take_both
