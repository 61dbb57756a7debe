"""A client's calls to a server: threads take turns; calls have deadlines and raise StoreErrors.

A call sends a packet and reads a reply. After a timeout, a wait is cancelled (CANCEL_WAIT). If the
wait had just ended, the call returns its result, so that a value taken off a queue is not lost. If
the server answers neither at once, or another reply is outstanding, the connection is closed, and
the next call reconnects. A forked child closes its copy of the parent's connection.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from nc10d.base.deadline import Deadline, Timeout, monotonic, seconds
from nc10d.base.run_to_end import run_to_end
from nc10d.base.signal_errors import raised_here
from nc10d.base.text import in_seconds
from nc10d.errors import ConnectTimeout, DistNetworkError, StoreError, StoreTimeout
from nc10d.store import wire as m
from nc10d.store.client_connect import connect, connect_once
from nc10d.store.connection import StoreConnection
from nc10d.store.store_errors import (
    LoopbackDown,
    NotAStore,
    explain_lost,
    explain_unreached,
    keys_text,
)

T = TypeVar("T")
_CANCEL_GRACE = 0.05


class StoreSession:
    """Calls the server at `host` and `port`; `name` is the store's name in errors."""

    def __init__(
        self, host: str, port: int, limit: float, name: str, token: bytes | None = None
    ) -> None:
        self.seconds = limit
        self.name = name
        self._token = token
        self.host, self.port = host, port
        # An RLock checks its owner. If Ctrl-C interrupts `acquire`, `release` shows whether this
        # thread had taken the lock (RuntimeError: it had not).
        self._lock = threading.RLock()
        self._holder = 0
        self._connection: StoreConnection | None = None
        self.is_nc10d = False
        """Whether the latest connection led to a server of nc10d's, not of torch's."""
        # True outside of a call if Ctrl-C also interrupted the clean-up after an error: then the
        # connection may still owe a reply.
        self._in_call = False
        # Whether the server has cancelled the wait of the call: the keys are not there.
        self._canceled = False
        self._closed = False
        _sessions.add(self)

    def connect(self, deadline: Deadline) -> None:
        """Connect to a server that may not be up yet; StoreTimeout if it is not by `deadline`.

        StoreError at once if the program that answers is not a store, or the loopback interface
        is down.
        """
        call = partial(self._connected, deadline, monotonic())
        connection = run_to_end(call, deadline.cancel, StoreConnection.close)
        self._connection, self.is_nc10d = connection, connection.is_nc10d

    def _connected(self, deadline: Deadline, begun: float) -> StoreConnection:
        try:
            return connect(self.host, self.port, deadline, self._token)
        except (NotAStore, LoopbackDown) as error:
            why = explain_unreached(error)
            raise DistNetworkError(f"cannot connect to {self.name}: {why}") from error
        except OSError as error:
            tried = f"the client socket has timed out after {in_seconds(monotonic() - begun)}"
            why = explain_unreached(error)
            raise ConnectTimeout(f"{tried}: cannot connect to {self.name}: {why}") from error

    def close(self) -> None:
        """Close the connection; idempotent. Later calls and a call in progress raise StoreError."""
        self._closed = True
        if self._holder != threading.get_ident() and self._lock.acquire(False):
            try:
                self._drop()
            finally:
                self._lock.release()
        elif (connection := self._connection) is not None:
            # Once closed, the descriptor's number may be reused: so only the thread that is using
            # the connection closes it.
            connection.shut()

    def call(
        self,
        packet: bytes,
        take: Callable[[StoreConnection], T],
        keys: Sequence[str],
        timeout: Timeout = None,
        waits: bool = False,
    ) -> T:
        """Send `packet` and return `take(connection)`, which reads the reply; threads take turns.

        `keys` are named in errors. With `waits`, the packet begins with a wait, which can be
        cancelled. StoreTimeout after `timeout` seconds (None: the session's); else StoreError.
        """
        limit = self.seconds if timeout is None else seconds(timeout)
        deadline = monotonic() + limit

        def request(connection: StoreConnection) -> T:
            connection.deadline, connection.waits = deadline, waits
            connection.send(packet)
            try:
                return take(connection)
            except raised_here(TimeoutError):
                if not self._has_just_ended(connection):
                    raise
                connection.deadline = monotonic() + max(limit, _CANCEL_GRACE)
                result = take(connection)
                if self._unless_lost(connection.take_canceled) is None:
                    self._drop()  # the call has its result all the same
                return result

        return self._in_turn(request, deadline, limit, keys)

    def post(self, packet: bytes, keys: Sequence[str]) -> None:
        """Send `packet`, which has no reply; errors as of `call`."""
        limit = self.seconds
        self._in_turn(
            lambda connection: connection.post(packet, limit), monotonic() + limit, limit, keys
        )

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
            if self._in_call:
                self._drop()
            self._in_call, self._canceled = True, False
            result = act(self._connection or self._reconnect(deadline))
            self._in_call = False
            return result
        except raised_here(OSError) as error:
            raise self._failure(error, limit, keys) from error
        except BaseException:
            self._drop()  # interrupted: the reply is still outstanding
            raise
        finally:  # release first, without a call before: Ctrl-C may interrupt any call
            self._holder = 0
            self._lock.release()
            if self._closed:  # by another thread meanwhile, which left the closing to this one
                self.close()

    def _failure(self, error: OSError, limit: float, keys: Sequence[str]) -> StoreError:
        """Return the error to raise; close the connection unless the wait was cancelled."""
        if self._canceled and isinstance(error, TimeoutError):
            self._in_call = False
            return self._timeout_error(limit, keys, "waited in vain")
        self._drop()
        if isinstance(error, TimeoutError):
            return self._timeout_error(limit, keys, "no answer")
        if self._closed:
            return StoreError(f"{self.name}{keys_text(keys)}: it was closed on this rank")
        return DistNetworkError(f"{self.name}{keys_text(keys)}: {explain_lost(error)}")

    def wait_then(
        self,
        packet: bytes,
        take: Callable[[StoreConnection], T],
        keys: Sequence[str],
        names: list[bytes],
        take_both: Callable[[StoreConnection], T] | None = None,
    ) -> T:
        """Wait for the keys `names`, then call; in the same packet if the server is nc10d's.

        Such a server keeps requests behind a wait until the wait ends. `take_both` reads the end
        of the wait and then the reply, as `take` does.
        """
        wait = m.with_keys(m.WAIT, names)
        connection = self._connection
        if connection is not None and connection.is_nc10d:
            return self.call(wait + packet, take_both or _take_stop_then(take), keys, None, True)
        end = monotonic() + self.seconds
        self.call(wait, StoreConnection.take_stop, keys, None, True)
        return self.call(packet, take, keys, max(_CANCEL_GRACE, end - monotonic()))

    def _take_turn(self, deadline: float, limit: float, keys: Sequence[str]) -> None:
        if self._holder == threading.get_ident():
            why = "it was called amid a call of the same thread, as by a signal's handler"
            raise StoreError(f"{self.name}{keys_text(keys)}: {why}")
        try:
            if self._lock.acquire(False):
                return
            left = min(max(0.0, deadline - monotonic()), threading.TIMEOUT_MAX)
            if not self._lock.acquire(timeout=left):
                raise self._timeout_error(limit, keys, "no turn beside another thread's call")
        except BaseException:
            try:
                self._lock.release()
            except raised_here(RuntimeError):
                pass  # the lock was not taken
            raise

    def _reconnect(self, deadline: float) -> StoreConnection:
        if self._closed:
            raise StoreError(f"{self.name} is closed on this rank")
        once = partial(connect_once, self.host, self.port, deadline, self._token)
        self._connection = run_to_end(once, drop=StoreConnection.close)
        self.is_nc10d = self._connection.is_nc10d
        return self._connection

    def _has_just_ended(self, connection: StoreConnection) -> bool:
        """Cancel the wait that timed out; return True if the wait had just ended: a reply comes.

        `_canceled` becomes True only if the server confirms the cancellation; otherwise `_failure`
        closes the connection.
        """
        if not connection.waits:
            return False
        canceled = self._unless_lost(partial(connection.cancel_wait, _CANCEL_GRACE))
        self._canceled = bool(canceled)
        return canceled is False

    def _unless_lost(self, act: Callable[[], bool]) -> bool | None:
        """Return `act()`; None if the connection fails meanwhile."""
        try:
            return act()
        except raised_here(OSError):
            return None

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _timeout_error(self, limit: float, keys: Sequence[str], why: str) -> StoreTimeout:
        text = f"timeout after {in_seconds(limit)}: {why}"
        return StoreTimeout(f"{self.name}{keys_text(keys)}: {text}")

    def after_fork(self) -> None:
        """In a forked child, close its copy of the parent's connection."""
        self._lock, self._holder = threading.RLock(), 0
        self._drop()


_sessions: weakref.WeakSet[StoreSession] = weakref.WeakSet()


def _after_fork() -> None:
    for session in [*_sessions]:
        session.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _take_stop_then(take: Callable[[StoreConnection], T]) -> Callable[[StoreConnection], T]:
    def take_both(connection: StoreConnection) -> T:
        connection.take_stop()
        return take(connection)

    return take_both
