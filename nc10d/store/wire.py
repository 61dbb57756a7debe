"""The store's wire as bytes and tuples, without I/O: torch 2.13's TCPStore protocol.

QUEUE_TAKE is an addition, for nc10d's servers only.

Little-endian. A request is a byte (its kind) and its fields; a string is a u64 length and that
many bytes; a list is a u64 count and its items. `Parser.feed` yields requests as tuples
`(kind, field, ...)`: keys and values are bytes, lists are Python lists. Bytes may arrive in any
pieces. Nothing is allocated for bytes that have not arrived. A request that breaks a rule or a
bound of `Limits` raises BadFrame, after which the connection must be closed; earlier requests are
valid, however the bytes were split.

This file, `values`, `table` and `server` import only a few modules of the standard library, because
every server process imports them at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple

(
    VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, GETNUMKEYS, DELETE_KEY, APPEND, MULTI_GET,
    MULTI_SET, CANCEL_WAIT, PING, QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS, BARRIER, QUEUE_TAKE,
) = range(20)  # fmt: skip

MAGIC = 0x3C85F7CE
READY, NOT_READY = b"\x00", b"\x01"
STOP_WAITING, WAIT_CANCELED = b"\x00", b"\x01"
# A client's nonce is its process number and ASKS, a bit that no process number has. torch's server
# returns the nonce unchanged. nc10d's server adds IS_NC10D (the server keeps requests behind a WAIT
# until the wait is over, and knows QUEUE_TAKE) and HAS_UNIX (GET of UNIX_NAME returns the Unix
# socket's name). No user can name UNIX_NAME, since users' keys begin with "/".
ASKS, IS_NC10D, HAS_UNIX = 1 << 31, 1 << 30, 1 << 29
TRAITS = IS_NC10D | HAS_UNIX
UNIX_NAME = b"nc10d/near"
OWNER_LEFT = "nc10d/owner-left"
"""A user's key, which a server sets when the owner has left: no further client can connect."""
REFUSED = "nc10d/refused"
"""A user's key: the address of the latest client that a server refused because of the token."""
# The first bytes to a client that is refused, and a last byte with the reason. No nonce is answered
# so: the bit ASKS is missing.
REFUSAL = b"\xffnc\x01"
NEEDS_TOKEN, HAS_NO_TOKEN, IS_FULL = b"t", b"n", b"f"

U32, U64, I64 = Struct("<I"), Struct("<Q"), Struct("<q")
_COUNT_LENGTH = Struct("<QQ")
_KIND_U32, _KIND_U64, _KIND_ONE = Struct("<BI"), Struct("<BQ"), Struct("<BQQ")
_u64, _length = U64.unpack_from, U64.pack
_kind_u64, _kind_one = _KIND_U64.pack, _KIND_ONE.pack

Request = tuple[Any, ...]
Bytes = bytes | memoryview


class Limits(NamedTuple):
    """The bounds of a server: bytes of a key, of a value, and in all, items of a list, and clients.

    `total` bounds the memory of keys, values, queues, waits, unfinished requests and replies that
    clients have not read. Each counts by its bytes; an entry also by the overhead in values.py.
    """

    key: int = 8 << 10
    value: int = 1 << 30
    total: int = 4 << 30
    items: int = 128 << 10
    clients: int = 64 << 10


class BadFrame(Exception):
    """The peer broke the protocol or a bound; the connection must be closed."""


class Incomplete(Exception):
    """The request is not complete, and needs at least `need` bytes from the buffer's start."""

    def __init__(self, need: int) -> None:
        super().__init__(need)
        self.need = need


class Parser:
    """Turns the bytes of a connection into requests."""

    __slots__ = ("_need", "held", "limits", "validated")

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 (an immutable tuple)
        self.limits = limits
        self.validated = False
        self.held = bytearray()  # the beginning of an incomplete request
        self._need = 0

    def feed(self, data: bytes) -> Generator[Request, None, None]:
        """Take `data` and yield the requests that are now complete.

        Each is parsed as the generator advances. A generator that is closed before the end leaves
        the other requests to the next one. A BadFrame is raised after the valid requests that
        precede it.
        """
        view: Bytes = data
        if self.held:
            self.held += data
            if len(self.held) < self._need:
                return
            view = memoryview(self.held)
        at, end, limits, parse = 0, len(view), self.limits, _PARSE
        self._need = 0
        try:
            if not self.validated and end:
                request, at = self._validate(view)
                yield request
            while at < end:
                kind = view[at]
                if kind > QUEUE_TAKE:
                    raise BadFrame(f"request of kind {kind}")
                request, at = parse[kind](view, at + 1, kind, limits)
                yield request
        except Incomplete as more:
            self._need = more.need - at
        finally:
            if isinstance(view, memoryview):
                view.release()
                del self.held[:at]
            elif at < end:
                self.held += memoryview(view)[at:]

    def _validate(self, data: Bytes) -> tuple[Request, int]:
        if data[0] != VALIDATE:
            raise BadFrame(f"request of kind {data[0]} before VALIDATE")
        request, at = _magic(data, 1, VALIDATE, self.limits)
        self.validated = True
        return request, at


def _number(data: Bytes, at: int, form: Struct) -> tuple[Any, int]:
    end = at + form.size
    if end > len(data):
        raise Incomplete(end)
    return form.unpack_from(data, at)[0], end


def _string(data: Bytes, at: int, longest: int, later: int = 0) -> tuple[bytes, int]:
    """Read a string; at least `later` more bytes must follow."""
    begin = at + 8
    if begin > len(data):
        raise Incomplete(begin + later)
    end = begin + _u64(data, at)[0]
    if end - begin > longest:
        raise BadFrame(f"a string of {end - begin} bytes, the limit is {longest}")
    if end > len(data):
        raise Incomplete(end + later)
    return bytes(data[begin:end]), end


def _count(data: Bytes, at: int, limits: Limits, least: int) -> tuple[int, int]:
    count, at = _number(data, at, U64)
    if count > limits.items:
        raise BadFrame(f"a list of {count} items, the limit is {limits.items}")
    # Wait for at least the smallest possible list: this keeps repeated parsing linear.
    if at + count * least > len(data):
        raise Incomplete(at + count * least)
    return count, at


def _nothing(data: Bytes, at: int, kind: int, limits: Limits) -> tuple[Request, int]:
    return (kind,), at


def _magic(data: Bytes, at: int, kind: int, limits: Limits) -> tuple[Request, int]:
    value, at = _number(data, at, U32)
    if value != MAGIC:
        raise BadFrame(f"magic number {value:#x}")
    return (kind,), at


def _nonce(data: Bytes, at: int, kind: int, limits: Limits) -> tuple[Request, int]:
    value, at = _number(data, at, U32)
    return (kind, value), at


def _key(data: Bytes, at: int, kind: int, limits: Limits) -> tuple[Request, int]:
    key, at = _string(data, at, limits.key)
    return (kind, key), at


def _key_value(data: Bytes, at: int, kind: int, limits: Limits) -> tuple[Request, int]:
    # Fast path: SETs come in bursts, and this one is complete and within the bounds.
    begin, end = at + 8, len(data)
    if begin <= end:
        mid = begin + _u64(data, at)[0]
        start = mid + 8
        if start <= end and mid - begin <= limits.key:
            stop = start + _u64(data, mid)[0]
            if stop <= end and stop - start <= limits.value:
                return (kind, bytes(data[begin:mid]), bytes(data[start:stop])), stop
    key, at = _string(data, at, limits.key, 8)
    value, at = _string(data, at, limits.value)
    return (kind, key, value), at


def _key_values(data: Bytes, at: int, kind: int, limits: Limits) -> tuple[Request, int]:
    key, at = _string(data, at, limits.key, 16)
    expected, at = _string(data, at, limits.value, 8)
    desired, at = _string(data, at, limits.value)
    return (kind, key, expected, desired), at


def _key_number(data: Bytes, at: int, kind: int, limits: Limits) -> tuple[Request, int]:
    key, at = _string(data, at, limits.key, 8)
    number, at = _number(data, at, I64)
    return (kind, key, number), at


def _keys(data: Bytes, at: int, kind: int, limits: Limits) -> tuple[Request, int]:
    begin = at + _COUNT_LENGTH.size
    if begin <= len(data):
        count, length = _COUNT_LENGTH.unpack_from(data, at)
        end: int = begin + length
        if count == 1 and length <= limits.key and end <= len(data):  # the usual case
            return (kind, [bytes(data[begin:end])]), end
    count, at = _count(data, at, limits, 8)
    keys = []
    for left in range(count - 1, -1, -1):
        key, at = _string(data, at, limits.key, 8 * left)
        keys.append(key)
    return (kind, keys), at


def _pairs(data: Bytes, at: int, kind: int, limits: Limits) -> tuple[Request, int]:
    count, at = _count(data, at, limits, 16)
    pairs = []
    for left in range(count - 1, -1, -1):
        key, at = _string(data, at, limits.key, 8 + 16 * left)
        value, at = _string(data, at, limits.value, 16 * left)
        pairs.append((key, value))
    return (kind, pairs), at


_PARSE: tuple[Callable[[Bytes, int, int, Limits], tuple[Request, int]], ...] = (
    _magic, _key_value, _key_values, _key, _key_number, _keys, _keys, _nothing, _key, _key_value,
    _keys, _pairs, _nothing, _nonce, _key_value, _key, _key, _nothing, _key_number, _key,
)  # fmt: skip


def string(value: bytes) -> bytes:
    """Encode a string."""
    return U64.pack(len(value)) + value


def strings(values: Sequence[bytes]) -> bytes:
    """Encode a list of strings."""
    return b"".join([U64.pack(len(values)), *map(string, values)])


def simple(kind: int) -> bytes:
    """Encode a request without fields."""
    return bytes((kind,))


def with_u32(kind: int, number: int) -> bytes:
    """Encode VALIDATE or PING."""
    return _KIND_U32.pack(kind, number)


def with_key(kind: int, key: bytes) -> bytes:
    """Encode a request with a key: GET, DELETE_KEY, QUEUE_POP, QUEUE_LEN, QUEUE_TAKE."""
    return _kind_u64(kind, len(key)) + key


def with_value(kind: int, key: bytes, value: bytes) -> bytes:
    """Encode a request with a key and a value: SET, APPEND, QUEUE_PUSH."""
    return _kind_u64(kind, len(key)) + key + _length(len(value)) + value


def with_values(kind: int, key: bytes, *values: bytes) -> bytes:
    """Encode a request with a key and any number of values: COMPARE_SET has two."""
    return with_key(kind, key) + b"".join(map(string, values))


def i64(number: int) -> bytes:
    """Encode a number; TypeError unless an integer, ValueError beyond 64 bits."""
    try:
        return I64.pack(number)
    except StructError as error:
        if hasattr(number, "__index__"):
            raise ValueError(f"{number} does not fit in 64 bits") from error
        raise TypeError(f"expected an integer, not {type(number).__name__}") from error


def with_number(kind: int, key: bytes, number: int) -> bytes:
    """Encode ADD or BARRIER; errors as of `i64`."""
    return with_key(kind, key) + i64(number)


def with_keys(kind: int, keys: Sequence[bytes]) -> bytes:
    """Encode CHECK, WAIT or MULTI_GET."""
    if len(keys) == 1:  # by far the most common
        key = keys[0]
        return _kind_one(kind, 1, len(key)) + key
    return simple(kind) + strings(keys)


def with_pairs(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode MULTI_SET."""
    fields = [string(key) + string(value) for key, value in pairs]
    return b"".join([_KIND_U64.pack(MULTI_SET, len(fields)), *fields])
