"""The decisions of a store's server, without I/O: requests in, replies out, waits remembered.

`apply(request, client)` returns the replies that are due now as (client, bytes) pairs, in the
order in which each client must receive them. None in place of bytes means that the client broke a
rule and must be closed. A client is any hashable object. While a client's WAIT, BARRIER or
QUEUE_TAKE is pending, its further requests are held. CANCEL_WAIT ends the wait and discards the
held requests. Waits and held requests count as memory of the values, with the same bound.

The end of a wait executes none of the later requests: the client joins `released`, and the caller
applies the `held` requests before later ones. So the caller can send, and count, the replies to
each request before executing the next, and serve other clients in between.

QUEUE_TAKE waits for a value in a queue and takes it: nc10d's blocking queue_pop. QUEUE_TAKE comes
before the waits of torch's clients, which send WAIT for the key and then QUEUE_POP, and fail if the
queue is empty by then. So a push ends the wait of a single client of torch's, as torch's server
does. The WAIT of nc10d's clients takes no value: a push ends all of those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from nc10d.store import wire as m
from nc10d.store.values import Full, NotANumber, Values

Reply = tuple[Any, bytes | memoryview | None]
"""A client, and the bytes to send; a memoryview is a value itself, not a copy."""
_Handler = Callable[[m.Request, Hashable, list[Reply]], None]
_MOST_HELD = 64 << 10
_LARGEST_JOINED = 1 << 16
_WAIT_BYTES, _MISSING_BYTES = 1400, 600
"""The memory of a wait, and of each awaited key besides the key's own bytes."""


class _Wait:
    """A client's wait: for missing keys, a barrier's count, or a value in a queue."""

    __slots__ = ("count", "missing", "nbytes")

    def __init__(self, missing: set[bytes], count: int = 0) -> None:
        self.missing = missing
        self.count = count
        self.nbytes = _WAIT_BYTES + sum(map(len, missing)) + _MISSING_BYTES * len(missing)


class _Backlog:
    """The requests behind a client's wait."""

    __slots__ = ("nbytes", "requests")

    def __init__(self) -> None:
        self.requests: deque[m.Request] = deque()
        self.nbytes = 0


class Table:
    """The values of a store, and the clients that wait for them."""

    def __init__(self, limits: m.Limits = m.Limits()) -> None:  # noqa: B008 (an immutable tuple)
        self.values = Values(limits.total)
        # The name of the server's Unix socket, for clients on its host; empty without one.
        self.unix_name = b""
        self._waits: dict[Hashable, _Wait] = {}
        self._waiters: dict[bytes, dict[Hashable, None]] = {}
        self._barriers: dict[bytes, dict[Hashable, None]] = {}
        self._takers: dict[bytes, dict[Hashable, None]] = {}
        # The clients that have sent ASKS, and so are nc10d's.
        self._own_clients: set[Hashable] = set()
        self._backlogs: dict[Hashable, _Backlog] = {}
        # The clients whose wait is over, and that have held requests.
        self.released: deque[Any] = deque()
        self._handlers: tuple[_Handler, ...] = (
            self._nothing, self._set, self._compare_set, self._get, self._add, self._check,
            self._wait, self._num_keys, self._delete_key, self._append, self._multi_get,
            self._multi_set, self._cancel_wait, self._ping, self._queue_push, self._queue_pop,
            self._queue_len, self._list_keys, self._barrier, self._queue_take,
        )  # fmt: skip

    def apply(
        self, request: m.Request, client: Hashable, replies: list[Reply] | None = None
    ) -> list[Reply]:
        """Execute a request of `client`; return the replies that are due to this and other clients.

        The replies are appended to `replies`, if given.
        """
        if replies is None:
            replies = []
        if self._waits and client in self._waits and request[0] != m.CANCEL_WAIT:
            self._hold(request, client, replies)
            return replies
        try:
            self._handlers[request[0]](request, client, replies)
        except (Full, NotANumber):
            replies.append((client, None))
        return replies

    def held(self, client: Hashable) -> Iterator[m.Request]:
        """Take the requests of a released client, in order, until the client waits again."""
        while client not in self._waits and (backlog := self._backlogs.get(client)):
            request = backlog.requests.popleft()
            size = _memory_of(request)
            backlog.nbytes -= size
            self.values.nbytes -= size
            if not backlog.requests:
                del self._backlogs[client]
            yield request

    def forget(self, client: Hashable) -> None:
        """Forget a client that has disconnected, and the client's wait."""
        self._own_clients.discard(client)
        self._cancel(client)
        self._drop_backlog(client)

    def _cancel(self, client: Hashable) -> None:
        """End a client's wait, if any."""
        if client not in self._waits:
            return
        wait = self._end(client)
        self._drop_backlog(client)
        for key in wait.missing:
            for waiting in (self._waiters, self._barriers, self._takers):
                if client in waiting.get(key, ()):
                    _leave(waiting, key, client)

    def _drop_backlog(self, client: Hashable) -> None:
        if client in self._backlogs:
            self.values.nbytes -= self._backlogs.pop(client).nbytes

    def _begin(self, client: Hashable, wait: _Wait) -> None:
        """Add a client's wait; Full if there is no memory for it."""
        self.values.grow(wait.nbytes)
        self._waits[client] = wait

    def _end(self, client: Hashable) -> _Wait:
        """Remove and return a client's wait."""
        wait = self._waits.pop(client)
        self.values.nbytes -= wait.nbytes
        return wait

    def _hold(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        backlog, size = self._backlogs.setdefault(client, _Backlog()), _memory_of(request)
        try:
            if backlog.nbytes + size > _MOST_HELD:
                raise Full("too much behind a wait")
            self.values.grow(size)
        except Full:
            replies.append((client, None))
            return
        backlog.nbytes += size
        backlog.requests.append(request)

    def _release(self, client: Hashable, replies: list[Reply]) -> None:
        self._end(client)
        backlog = self._backlogs.get(client)
        # Nearly always a single GET is held behind the wait. After a long wait the CPU's caches
        # are cold and each function costs time: answer that case here.
        if backlog is not None and len(backlog.requests) == 1 and backlog.requests[0][0] == m.GET:
            value = self.values.get(backlog.requests[0][1])
            if len(value) <= _LARGEST_JOINED:
                self._drop_backlog(client)
                replies.append((client, m.STOP_WAITING + m.U64.pack(len(value)) + value))
                return
        replies.append((client, m.STOP_WAITING))
        if backlog is not None:
            self.released.append(client)

    def _arrived(self, key: bytes, client: Hashable, replies: list[Reply]) -> None:
        missing = self._waits[client].missing
        missing.discard(key)
        if not missing:
            self._release(client, replies)

    def _wake_all(self, key: bytes, replies: list[Reply]) -> None:
        for client in self._waiters.pop(key, ()):
            self._arrived(key, client, replies)

    def _wake_for_queue(self, key: bytes, other: bool, replies: list[Reply]) -> None:
        """Tell nc10d's clients that a key is there; if `other`, other clients in turn, too.

        Their turn ends with the first for which this was the last missing key.
        """
        for client in [*self._waiters.get(key, ())]:
            own = client in self._own_clients
            if own or other:
                _leave(self._waiters, key, client)
                self._arrived(key, client, replies)
                other = other and (own or client in self._waits)

    def _nothing(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        pass

    def _ping(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        nonce = request[1]
        if nonce & m.ASKS:
            self._own_clients.add(client)
            nonce |= m.TRAITS if self.unix_name else m.IS_NC10D
        replies.append((client, m.U32.pack(nonce)))

    def _set(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        self.values.put(request[1], request[2])
        if self._waiters:
            self._wake_all(request[1], replies)

    def _multi_set(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        for key, value in request[1]:
            self.values.put(key, value)
        for key, _ in request[1]:
            self._wake_all(key, replies)

    def _append(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        self.values.extend(request[1], request[2])
        self._wake_all(request[1], replies)

    def _compare_set(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        _, key, expected, desired = request
        _reply_value(self.values.compare_set(key, expected, desired), client, replies)
        if key in self.values.data:
            self._wake_all(key, replies)

    def _add(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        replies.append((client, m.I64.pack(self.values.add(request[1], request[2]))))
        if self._waiters:
            self._wake_all(request[1], replies)

    def _get(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        value = self.values.get(request[1])
        _reply_value(self.unix_name if request[1] == m.UNIX_NAME else value, client, replies)

    def _multi_get(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        values = [*map(self.values.get, request[1])]
        if sum(map(len, values)) <= _LARGEST_JOINED:
            replies.append((client, b"".join(map(m.string, values))))
            return
        for value in values:  # not copied: a request may name the same key many times
            replies += [(client, m.U64.pack(len(value))), (client, memoryview(value))]

    def _check(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        ready = all(map(self.values.exists, request[1]))
        replies.append((client, m.READY if ready else m.NOT_READY))

    def _wait(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        exists = self.values.exists
        if all(map(exists, request[1])):
            replies.append((client, m.STOP_WAITING))
            return
        missing = {key for key in request[1] if not exists(key)}
        self._begin(client, _Wait(missing))
        for key in missing:
            self._waiters.setdefault(key, {})[client] = None

    def _cancel_wait(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        self._cancel(client)
        replies.append((client, m.WAIT_CANCELED))

    def _num_keys(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        replies.append((client, m.I64.pack(len(self.values.data))))

    def _list_keys(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        replies.append((client, m.strings([*self.values.data])))

    def _delete_key(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        replies.append((client, m.I64.pack(self.values.remove(request[1]))))

    def _queue_push(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        key = request[1]
        self.values.push(key, request[2])
        taken = key in self._takers
        if taken:
            taker = next(iter(self._takers[key]))
            _leave(self._takers, key, taker)
            self._end(taker)
            self._give(key, taker, replies)
            if taker in self._backlogs:
                self.released.append(taker)
        self._wake_for_queue(key, not taken, replies)

    def _queue_take(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        key = request[1]
        if self.values.queued(key):
            self._give(key, client, replies)
            return
        self._begin(client, _Wait({key}))
        self._takers.setdefault(key, {})[client] = None

    def _give(self, key: bytes, client: Hashable, replies: list[Reply]) -> None:
        """Answer a QUEUE_TAKE with the oldest value of a queue that has one."""
        value = self.values.pop(key)
        assert value is not None, "the queue has a value"
        replies.append((client, m.STOP_WAITING))
        _reply_value(value, client, replies)

    def _queue_pop(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        replies.append((client, m.I64.pack(self.values.queued(request[1]))))
        value = self.values.pop(request[1])
        if value is not None:
            _reply_value(value, client, replies)

    def _queue_len(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        replies.append((client, m.I64.pack(self.values.queued(request[1]))))

    def _barrier(self, request: m.Request, client: Hashable, replies: list[Reply]) -> None:
        _, key, world_size = request
        count = self.values.add(key, 1)
        self._begin(client, _Wait({key}, world_size))
        waiting = self._barriers.setdefault(key, {})
        waiting[client] = None
        for member in [member for member in waiting if self._waits[member].count <= count]:
            del waiting[member]
            self._release(member, replies)
        if not waiting:
            del self._barriers[key]
        self._wake_all(key, replies)


def _leave(waiting: dict[bytes, dict[Hashable, None]], key: bytes, client: Hashable) -> None:
    """Take a client off those that wait for a key."""
    del waiting[key][client]
    if not waiting[key]:
        del waiting[key]


def _memory_of(request: m.Request) -> int:
    """Return roughly the memory of a held request, in bytes."""
    fields = request[1] if request[1:] and isinstance(request[1], list) else request[1:]
    return 64 + sum(64 + len(field) for field in fields if isinstance(field, bytes))


def _reply_value(value: bytes, client: Hashable, replies: list[Reply]) -> None:
    if len(value) <= _LARGEST_JOINED:
        data = m.U64.pack(len(value)) + value
        # Send the end of a wait and the value that follows in one packet.
        if replies and replies[-1] == (client, m.STOP_WAITING):
            replies[-1] = (client, m.STOP_WAITING + data)
        else:
            replies.append((client, data))
    else:  # a large value is not copied, however many clients request it
        replies += [(client, m.U64.pack(len(value))), (client, memoryview(value))]
