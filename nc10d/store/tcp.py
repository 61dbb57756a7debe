"""TCPStore: a client of a store's server, by torch 2.13's protocol, and optionally its owner.

Several threads may share a store. They share the connection, so a call that waits blocks the calls
of other threads: a thread that waits long should use a `clone()`. The calls of one thread take
effect in order. `set`, `append`, `multi_set` and `queue_push` return without a reply. The store
stays usable after a timeout or an interruption: the next call reconnects if necessary. A forked
child connects anew at the first call.
"""

# ruff: noqa: D102  (Store documents the methods)
from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from nc10d.auth.token import check_token, job_token
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.run_to_end import off_main, run_to_end
from nc10d.base.signal_errors import raised_here
from nc10d.base.wait_report import WaitReport
from nc10d.errors import QueueEmptyError, StoreError, StoreTimeout
from nc10d.store import wire as m
from nc10d.store.arrival import refused_text
from nc10d.store.base import (
    DEFAULT_TIMEOUT,
    MOST_KEY,
    Store,
    Value,
    decode_key,
    encode_key,
    encode_keys,
    encode_value,
    key_list,
    pair,
)
from nc10d.store.connection import StoreConnection
from nc10d.store.hosting import Hosting, check_port, host_server, shared_server
from nc10d.store.session import StoreSession
from nc10d.store.store_errors import not_a_number_error
from nc10d.store.values import NotANumber, read_number

T = TypeVar("T")
_ARRIVALS_KEY = b"init/"
_PROBE_SECONDS = 0.25
_GRACE_SECONDS = 1.0
"""The longest time that a handler's error waits for a server's start to end."""


class TCPStore(Store):
    """A store served over TCP; with `is_master`, this process also starts the server.

    `port` 0 chooses a free port (see the `port` property). With `world_size` the
    store counts clients; with `wait_for_workers` too, the master blocks until all have connected.
    `multi_tenant` shares a server that this process already runs on that port. `master_listen_fd`
    is a bound TCP socket to serve. `use_libuv` changes nothing; `libuvBackend` returns it. Under
    torchrun or nc10d.run, whose agent serves MASTER_PORT, a master of that port is a client, as
    torch's. `server` is "process" (the default: a busy owner does not delay the server, which ends
    once the owner and all clients have gone) or "thread". `limits` are the server's bounds
    (docs/security.md); torch's server ends a client that sends a value above 8 MiB. Once the owner
    has closed the store or has died, the port is free, and clients that are connected are served
    further. A client on the server's host uses a Unix socket, unless NC10D_STORE_TCP is set.
    StoreError if the address is in use, and StoreTimeout if it cannot be reached in time. A host
    name that is not known is asked for again for 5 seconds, or NC10D_DNS_TIMEOUT.

    Server and clients prove to each other that they know `token`: 32 bytes (else ValueError), or a
    function that returns them; by default the job's token, if it has one (auth/token.py). With
    None they speak torch's protocol; then the server listens on loopback addresses only, else
    AuthError, unless NC10D_INSECURE=1. With `same_user`, a master with a token also serves clients
    without it that speak torch's protocol, if they run on this machine under this user.
    """

    def __init__(
        self,
        host_name: str,
        port: int = 0,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        server: str = "process",
        limits: m.Limits = m.Limits(),  # noqa: B008 (an immutable tuple)
        token: bytes | Callable[[], bytes | None] | None = job_token,
        same_user: bool = False,
    ) -> None:
        if world_size == 0:
            raise ValueError("TCPStore world size cannot be 0")
        host = host_name
        is_master = is_master and not _agent_serves(port)
        check_port(port, least=0 if is_master else 1)
        self._libuv = use_libuv
        self._seconds = seconds(timeout)
        self._token = token = check_token(token() if callable(token) else token)
        self._hosting: Hosting | None = None
        if is_master:
            hosted = partial(shared_server, host, port, server, limits, token)
            if not multi_tenant or master_listen_fd is not None:
                fixed = master_listen_fd, same_user
                hosted = partial(host_server, host, port, server, limits, token, *fixed)
            # The error waits for a moment, so that a second try finds the port free.
            self._hosting = run_to_end(hosted, drop=Hosting.release, grace=_GRACE_SECONDS)
        self._host, self._port = host, self._hosting.port if self._hosting else port
        # The owner may be unable to reach itself under the name that others use.
        server_host = self._hosting.host if self._hosting else host
        self._session = StoreSession(
            server_host, self._port, self._seconds, f"store {self.address}", token
        )
        self._call, self._post = self._session.call, self._session.post
        self._wait_then = self._session.wait_then
        try:
            self._join(world_size, is_master and wait_for_workers)
        except BaseException:
            self.close()
            raise

    def _join(self, world_size: int | None, wait_for_workers: bool) -> None:
        deadline = Deadline.after(self._seconds)
        self._session.connect(deadline)
        if self._hosting is not None:
            self._hosting.reap()
        if world_size is None or world_size < 0:
            return
        self._arrivals(1)
        if wait_for_workers:
            self._await_workers(world_size, deadline)

    def _arrivals(self, more: int) -> int:
        return self._call(
            m.with_number(m.ADD, _ARRIVALS_KEY, more), StoreConnection.take_number, ()
        )

    def _await_workers(self, world_size: int, deadline: Deadline) -> None:
        pause = 0.001
        report = WaitReport(f"store {self.address}", deadline)
        while (count := self._arrivals(0)) < world_size:
            report.look(partial("{} of {} clients have come".format, count, world_size))
            if deadline.expired():
                # The words that torch's callers look for.
                text = f"Timed out after {self._seconds:g} seconds waiting for clients"
                joined = f"{count}/{world_size} clients joined{refused_text(self)}"
                raise StoreTimeout(f"store {self.address}: {text}. {joined}.")
            # The protocol has no wait for a count, and torch's clients only increment it: poll.
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    @property
    def host(self) -> str:
        """The host that clients connect to, as given."""
        return self._host

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._port

    @property
    def libuvBackend(self) -> bool:
        """The argument `use_libuv`."""
        return self._libuv

    @property
    def address(self) -> str:
        """Host and port, as errors name them."""
        return f"{self._host}:{self._port}"

    def __repr__(self) -> str:
        return f"TCPStore({self.address})"

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: Value) -> None:
        self._post(m.with_value(m.SET, _key(key), encode_value(value)), (key,))

    def get(self, key: str) -> bytes:
        name = _key(key)
        packet = m.with_key(m.GET, name)
        take, take_both = StoreConnection.take_string, StoreConnection.take_stop_and_string
        return self._wait_then(packet, take, (key,), [name], take_both)

    def add(self, key: str, amount: int) -> int:
        packet = m.with_number(m.ADD, _key(key), amount)
        return self._counted(key, packet, StoreConnection.take_number)

    def _counted(
        self,
        key: str,
        packet: bytes,
        take: Callable[[StoreConnection], T],
        timeout: Timeout = None,
        waits: bool = False,
    ) -> T:
        try:
            return self._call(packet, take, (key,), timeout, waits)
        except raised_here(StoreError) as error:
            lost = error.__cause__ is not None and not isinstance(error, StoreTimeout)
            raise (self._explained(error, key) if lost else error) from error.__cause__

    @off_main
    def _explained(self, error: StoreError, key: str) -> StoreError:
        """Return `error`, or a NotANumberError if `key` does not hold a number.

        The protocol has no reply for that: the server closes the connection. So read the value.
        """
        name, value = _key(key), b"0"
        with contextlib.suppress(StoreError):
            if self._call(m.with_keys(m.CHECK, [name]), _take_byte, (), _PROBE_SECONDS) == m.READY:
                value = self._call(
                    m.with_key(m.GET, name), StoreConnection.take_string, (), _PROBE_SECONDS
                )
        try:
            read_number(value)
        except NotANumber:
            return not_a_number_error(f"store {self.address}", key, value)
        return error

    def check(self, keys: Sequence[str]) -> bool:
        keys = key_list(keys)
        return self._call(m.with_keys(m.CHECK, _keys(keys)), _take_byte, keys) == m.READY

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        keys = key_list(keys)
        self._call(m.with_keys(m.WAIT, _keys(keys)), StoreConnection.take_stop, keys, timeout, True)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        values = encode_value(expected), encode_value(desired)
        packet = m.with_values(m.COMPARE_SET, _key(key), *values)
        return self._call(packet, StoreConnection.take_string, (key,))

    def append(self, key: str, value: Value) -> None:
        self._post(m.with_value(m.APPEND, _key(key), encode_value(value)), (key,))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        keys = key_list(keys)
        names = _keys(keys)
        take = _take_strings(len(names))
        return self._wait_then(m.with_keys(m.MULTI_GET, names), take, keys, names)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        keys = key_list(keys)
        pairs = [(b"/" + key, value) for key, value in pair(keys, values)]
        self._post(m.with_pairs(pairs), keys)

    def delete_key(self, key: str) -> bool:
        return (
            self._call(m.with_key(m.DELETE_KEY, _key(key)), StoreConnection.take_number, (key,)) > 0
        )

    def num_keys(self) -> int:
        return self._call(m.simple(m.GETNUMKEYS), StoreConnection.take_number, ())

    def list_keys(self) -> list[str]:
        names = self._call(m.simple(m.LIST_KEYS), _take_list, ())
        return [decode_key(name[1:]) for name in names if name.startswith(b"/")]

    def queue_push(self, key: str, value: Value) -> None:
        self._post(m.with_value(m.QUEUE_PUSH, _key(key), encode_value(value)), (key,))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = _key(key)
        if block and self._session.is_nc10d:
            take, packet = StoreConnection.take_stop_and_string, m.with_key(m.QUEUE_TAKE, name)
            return self._call(packet, take, (key,), None, True)
        packet = m.with_key(m.QUEUE_POP, name)
        if block:  # as torch's client: a value under the key ends the wait too
            value = self._wait_then(packet, _take_popped, (key,), [name])
        else:
            value = self._call(packet, _take_popped, (key,))
        if value is None:
            raise QueueEmptyError(f"store {self.address}: the queue {key!r} is empty")
        return value

    def queue_len(self, key: str) -> int:
        return self._call(m.with_key(m.QUEUE_LEN, _key(key)), StoreConnection.take_number, (key,))

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        packet = m.with_number(m.BARRIER, _key(key), world_size)
        self._counted(key, packet, StoreConnection.take_stop, timeout, True)

    def clone(self) -> TCPStore:
        host = self._session.host
        twin = TCPStore(host, self._port, timeout=self._seconds, token=self._token)
        twin._host = self._host
        return twin

    def set_timeout(self, timeout: Timeout) -> None:
        super().set_timeout(timeout)
        self._session.seconds = self._seconds

    def close(self) -> None:
        self._session.close()
        hosting, self._hosting = self._hosting, None
        if hosting is not None:
            hosting.release()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end the modules that `close` uses may be gone; the kernel cleans up.
        if hasattr(self, "_session") and not ending():
            self.close()


def _agent_serves(port: int) -> bool:
    """Return whether a launcher's agent serves `port` to its ranks, by torchrun's variables."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true")
    return agent and os.environ.get("MASTER_PORT") == str(port)


def _key(key: str) -> bytes:
    try:
        name = ("/" + key).encode()
    except (TypeError, UnicodeEncodeError):
        return b"/" + encode_key(key)
    return name if len(name) <= MOST_KEY else b"/" + encode_key(key)


def _keys(keys: Sequence[str]) -> list[bytes]:
    if len(keys) == 1:
        return [_key(keys[0])]
    return [b"/" + key for key in encode_keys(keys)]


def _take_byte(connection: StoreConnection) -> bytes:
    return connection.take(1)


def _take_strings(count: int) -> Callable[[StoreConnection], list[bytes]]:
    return lambda connection: [connection.take_string() for _ in range(count)]


def _take_list(connection: StoreConnection) -> list[bytes]:
    return _take_strings(connection.take_number())(connection)


def _take_popped(connection: StoreConnection) -> bytes | None:
    return connection.take_string() if connection.take_number() > 0 else None
