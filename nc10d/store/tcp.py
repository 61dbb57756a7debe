"""TCPStore: a client of a store's server, by torch 2.13's protocol, and the server's owner.

Several threads may share a store: one connection, calls take turns, and a call that waits makes
the others wait; a thread that waits long should have a `clone()`. Calls of one thread take effect
in their order. `set`, `append`, `multi_set` and `queue_push` await no answer. After a timeout or
an interruption the store goes on: the next call connects again where that is needed. A forked
child gets a connection of its own at its first call.
"""

# ruff: noqa: D102  (what a call does is said once, in Store)
from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence

from nc10d.auth.token import checked, job_token
from nc10d.base.deadline import Timeout, seconds
from nc10d.errors import QueueEmptyError, StoreError, StoreTimeout
from nc10d.store import wire as m
from nc10d.store.base import (
    DEFAULT_TIMEOUT,
    MOST_KEY,
    Store,
    Value,
    decode_key,
    encode_key,
    encode_keys,
    encode_value,
    pair,
)
from nc10d.store.connection import StoreConnection
from nc10d.store.hosting import Hosting, check_port, host_server, shared_server
from nc10d.store.session import StoreSession
from nc10d.store.store_errors import not_a_number
from nc10d.store.values import NotANumber, read_number

_ARRIVALS = b"init/"
_BLAME = 0.25


class TCPStore(Store):
    """A store served over TCP; with `is_master`, this process also starts the server.

    `port` 0 lets the server choose (see the `port` property). With `world_size` the store counts
    who comes, and with `wait_for_workers` the master returns when all have. `multi_tenant` shares
    a server that this process has on that port already. `master_listen_fd` is a listening socket
    to serve. `use_libuv` is accepted for torch's sake and means nothing. `server` says where the
    server runs, "process" (the default: a busy owner delays nobody, and it ends once the owner
    and all clients have gone) or "thread"; `limits` are its bounds. A client on the server's
    host goes on over a Unix socket, unless NC10D_STORE_TCP is set. Raises StoreError if the
    address is taken or cannot be reached within `timeout`.

    Server and clients prove to each other that they know `token`: 32 bytes (else ValueError), or
    what is called to get them; by default the job's, if it has one (auth/token.py). With None they
    speak
    torch's wire, and the server listens on addresses of this machine alone, else AuthError, unless
    NC10D_INSECURE=1.
    """

    def __init__(
        self,
        host: str,
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
    ) -> None:
        if world_size == 0:
            raise ValueError("TCPStore world size cannot be 0")
        check_port(port, least=0 if is_master else 1)
        self._seconds = seconds(timeout)
        self._token = token = checked(token() if callable(token) else token)
        self._hosting: Hosting | None = None
        if is_master and multi_tenant and master_listen_fd is None:
            self._hosting = shared_server(host, port, server, limits, token)
        elif is_master:
            self._hosting = host_server(host, port, server, limits, token, master_listen_fd)
        self._host, self._port = host, self._hosting.port if self._hosting else port
        # The owner need not be able to reach itself under the name that others use.
        near = self._hosting.host if self._hosting else host
        self._caller = StoreSession(near, self._port, self._seconds, f"store {self.address}", token)
        self._call, self._tell = self._caller.call, self._caller.tell
        self._wait_then = self._caller.wait_then
        try:
            self._join(world_size, is_master and wait_for_workers)
        except BaseException:
            self.close()
            raise

    def _join(self, world_size: int | None, wait_for_workers: bool) -> None:
        deadline = time.monotonic() + self._seconds
        self._caller.connect(deadline)
        if self._hosting is not None:
            self._hosting.reap()
        if world_size is None or world_size < 0:
            return
        self._arrivals(1)
        if wait_for_workers:
            self._await_workers(world_size, deadline)

    def _arrivals(self, more: int) -> int:
        return self._call(m.with_number(m.ADD, _ARRIVALS, more), StoreConnection.take_number, ())

    def _await_workers(self, world_size: int, deadline: float) -> None:
        pause = 0.001
        while (count := self._arrivals(0)) < world_size:
            if time.monotonic() >= deadline:
                raise StoreTimeout(
                    f"store {self.address}: {count} of {world_size} clients came within "
                    f"{self._seconds:g} s"
                )
            # The protocol has no wait for a count, and torch's clients only ever add to it.
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    @property
    def host(self) -> str:
        """The host that clients connect to, as it was given."""
        return self._host

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._port

    @property
    def address(self) -> str:
        """Host and port, as errors name them."""
        return f"{self._host}:{self._port}"

    def __repr__(self) -> str:
        return f"TCPStore({self.address})"

    def set(self, key: str, value: Value) -> None:
        self._tell(m.with_value(m.SET, _key(key), encode_value(value)), (key,))

    def get(self, key: str) -> bytes:
        name = _key(key)
        packet = m.with_key(m.GET, name)
        take, take_both = StoreConnection.take_string, StoreConnection.take_stop_and_string
        return self._wait_then(packet, take, (key,), [name], take_both)

    def add(self, key: str, amount: int) -> int:
        try:
            return self._call(
                m.with_number(m.ADD, _key(key), amount), StoreConnection.take_number, (key,)
            )
        except StoreError as error:
            raise self._blamed(error, key) from error.__cause__

    def _blamed(self, error: StoreError, key: str) -> StoreError:
        """Return `error`, or what says that `key` does not hold a number.

        The protocol has no answer for that: the server closes the connection. So ask it anew.
        """
        if isinstance(error, StoreTimeout):
            return error
        name, value = _key(key), b"0"
        with contextlib.suppress(StoreError):
            if self._call(m.with_keys(m.CHECK, [name]), _take_byte, (), _BLAME) == m.READY:
                value = self._call(m.with_key(m.GET, name), StoreConnection.take_string, (), _BLAME)
        try:
            read_number(value)
        except NotANumber:
            return not_a_number(f"store {self.address}", key, value)
        return error

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(m.with_keys(m.CHECK, _keys(keys)), _take_byte, keys) == m.READY

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        self._call(m.with_keys(m.WAIT, _keys(keys)), StoreConnection.take_stop, keys, timeout, True)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        values = encode_value(expected), encode_value(desired)
        packet = m.with_values(m.COMPARE_SET, _key(key), *values)
        return self._call(packet, StoreConnection.take_string, (key,))

    def append(self, key: str, value: Value) -> None:
        self._tell(m.with_value(m.APPEND, _key(key), encode_value(value)), (key,))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = _keys(keys)
        take = _take_strings(len(names))
        return self._wait_then(m.with_keys(m.MULTI_GET, names), take, keys, names)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = [(b"/" + key, value) for key, value in pair(keys, values)]
        self._tell(m.with_pairs(pairs), keys)

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
        self._tell(m.with_value(m.QUEUE_PUSH, _key(key), encode_value(value)), (key,))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = _key(key)
        packet = m.with_key(m.QUEUE_POP, name)
        if block:
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
        try:
            self._call(packet, StoreConnection.take_stop, (key,), timeout, True)
        except StoreError as error:
            raise self._blamed(error, key) from error.__cause__

    def clone(self) -> TCPStore:
        host = self._caller.host
        twin = TCPStore(host, self._port, timeout=self._seconds, token=self._token)
        twin._host = self._host
        return twin

    def set_timeout(self, timeout: Timeout) -> None:
        super().set_timeout(timeout)
        self._caller.seconds = self._seconds

    def close(self) -> None:
        self._caller.close()
        hosting, self._hosting = self._hosting, None
        if hosting is not None:
            hosting.release()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, what `close` calls may be gone: the kernel does all that then.
        if hasattr(self, "_caller") and not ending():
            self.close()


def _key(key: str) -> bytes:
    try:
        name = ("/" + key).encode()
    except (TypeError, UnicodeEncodeError):
        return b"/" + encode_key(key)
    return name if len(name) <= MOST_KEY else b"/" + encode_key(key)


def _keys(keys: Sequence[str]) -> list[bytes]:
    if isinstance(keys, list) and len(keys) == 1:
        return [_key(keys[0])]
    return [b"/" + key for key in encode_keys(keys)]


def _take_byte(link: StoreConnection) -> bytes:
    return link.take(1)


def _take_strings(count: int) -> Callable[[StoreConnection], list[bytes]]:
    return lambda link: [link.take_string() for _ in range(count)]


def _take_list(link: StoreConnection) -> list[bytes]:
    return _take_strings(link.take_number())(link)


def _take_popped(link: StoreConnection) -> bytes | None:
    return link.take_string() if link.take_number() > 0 else None
