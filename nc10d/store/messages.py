"""The wire of torch 2.13's TCPStore, without I/O: bytes in, requests out, and back.

Little-endian. A string (keys and values alike) is a u64 length and its bytes; a list is a u64
count and its strings; a request is one byte of type and its fields. Keys are bytes as they travel:
torch's client puts "/" in front of the user's key, and that is the client's affair.

A request is a plain tuple, its kind first: (SET, key, value), (ADD, key, amount), (WAIT, keys) ...
Nothing is allocated ahead of the bytes that have come. The standard library only: the server runs
this file as a sibling, without the package.

Answers, by kind: bytes (a string) for COMPARE_SET and GET; i64 for ADD, GETNUMKEYS, DELETE_KEY and
QUEUE_LEN; n strings without a count for MULTI_GET; i64 count and strings for LIST_KEYS; i64 length
before the pop and, if it was above 0, a string for QUEUE_POP; u32 for PING; one byte for CHECK
(READY or NOT_READY), WAIT, BARRIER (STOP_WAITING) and CANCEL_WAIT (WAIT_CANCELED). SET, APPEND,
MULTI_SET, QUEUE_PUSH and VALIDATE have no answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

VALIDATE: Final = 0
SET: Final = 1
COMPARE_SET: Final = 2
GET: Final = 3
ADD: Final = 4
CHECK: Final = 5
WAIT: Final = 6
GETNUMKEYS: Final = 7
DELETE_KEY: Final = 8
APPEND: Final = 9
MULTI_GET: Final = 10
MULTI_SET: Final = 11
CANCEL_WAIT: Final = 12
PING: Final = 13
QUEUE_PUSH: Final = 14
QUEUE_POP: Final = 15
QUEUE_LEN: Final = 16
LIST_KEYS: Final = 17
BARRIER: Final = 18

MAGIC: Final = 0x3C85F7CE
READY: Final = b"\x00"
NOT_READY: Final = b"\x01"
STOP_WAITING: Final = b"\x00"
WAIT_CANCELED: Final = b"\x01"

# (kind, field, ...): tuples, for the server makes one a call in its hottest loop.
Request: TypeAlias = tuple[Any, ...]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_KIND_U32 = struct.Struct("<BI")
_KIND_U64 = struct.Struct("<BQ")


class BadFrame(Exception):
    """What came is not the protocol, or goes beyond a bound; the connection can't be saved."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may hold: bytes of a key, bytes of its values together, keys in a list."""

    key: int = 8 << 10
    value: int = 1 << 30
    keys: int = 128 << 10


# ---- requests, as the client sends them ----------------------------------------------------------


def encode_validate() -> bytes:
    """Encode the first message of every connection; no answer."""
    return _KIND_U32.pack(VALIDATE, MAGIC)


def encode_ping(nonce: int) -> bytes:
    """Encode PING; the answer is the u32 `nonce`."""
    return _KIND_U32.pack(PING, nonce & 0xFFFFFFFF)


def encode_key(kind: int, key: bytes) -> bytes:
    """Encode GET, DELETE_KEY, QUEUE_POP or QUEUE_LEN."""
    return _KIND_U64.pack(kind, len(key)) + key


def encode_key_value(kind: int, key: bytes, value: bytes) -> bytes:
    """Encode SET, APPEND or QUEUE_PUSH; no answer."""
    return b"".join((_KIND_U64.pack(kind, len(key)), key, _U64.pack(len(value)), value))


def encode_key_int(kind: int, key: bytes, number: int) -> bytes:
    """Encode ADD or BARRIER; a number beyond i64 is a struct.error."""
    return b"".join((_KIND_U64.pack(kind, len(key)), key, _I64.pack(number)))


def encode_keys(kind: int, keys: Sequence[bytes]) -> bytes:
    """Encode WAIT, CHECK or MULTI_GET."""
    return _KIND_U64.pack(kind, len(keys)) + b"".join(map(encode_bytes, keys))


def encode_plain(kind: int) -> bytes:
    """Encode GETNUMKEYS, CANCEL_WAIT or LIST_KEYS: the kind alone."""
    return bytes((kind,))


def encode_set(key: bytes, value: bytes) -> bytes:
    """Encode SET; no answer."""
    return encode_key_value(SET, key, value)


def encode_append(key: bytes, value: bytes) -> bytes:
    """Encode APPEND; no answer."""
    return encode_key_value(APPEND, key, value)


def encode_queue_push(key: bytes, value: bytes) -> bytes:
    """Encode QUEUE_PUSH; no answer; wakes one waiter."""
    return encode_key_value(QUEUE_PUSH, key, value)


def encode_compare_set(key: bytes, expected: bytes, desired: bytes) -> bytes:
    """Encode COMPARE_SET; the answer is the value that then stands."""
    return encode_key_value(COMPARE_SET, key, expected) + encode_bytes(desired)


def encode_get(key: bytes) -> bytes:
    """Encode GET; a missing key is answered with an empty string."""
    return encode_key(GET, key)


def encode_delete_key(key: bytes) -> bytes:
    """Encode DELETE_KEY; the answer is 1 if the key was there, else 0."""
    return encode_key(DELETE_KEY, key)


def encode_queue_pop(key: bytes) -> bytes:
    """Encode QUEUE_POP; the answer is the length before the pop, then the value if it was > 0."""
    return encode_key(QUEUE_POP, key)


def encode_queue_len(key: bytes) -> bytes:
    """Encode QUEUE_LEN."""
    return encode_key(QUEUE_LEN, key)


def encode_add(key: bytes, amount: int) -> bytes:
    """Encode ADD; the answer is the sum."""
    return encode_key_int(ADD, key, amount)


def encode_barrier(key: bytes, world_size: int) -> bytes:
    """Encode BARRIER; answered when `world_size` calls have been made on `key`."""
    return encode_key_int(BARRIER, key, world_size)


def encode_check(keys: Sequence[bytes]) -> bytes:
    """Encode CHECK; READY if all keys exist."""
    return encode_keys(CHECK, keys)


def encode_wait(keys: Sequence[bytes]) -> bytes:
    """Encode WAIT; answered when all keys exist. Our server holds what follows until then."""
    return encode_keys(WAIT, keys)


def encode_multi_get(keys: Sequence[bytes]) -> bytes:
    """Encode MULTI_GET; the answer has one string a key and no count."""
    return encode_keys(MULTI_GET, keys)


def encode_multi_set(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encode MULTI_SET; no answer."""
    parts = [_KIND_U64.pack(MULTI_SET, len(pairs))]
    for key, value in pairs:
        parts += (_U64.pack(len(key)), key, _U64.pack(len(value)), value)
    return b"".join(parts)


def encode_cancel_wait() -> bytes:
    """Encode CANCEL_WAIT; WAIT_CANCELED comes in the wait's place, or after its STOP_WAITING."""
    return encode_plain(CANCEL_WAIT)


def encode_num_keys() -> bytes:
    """Encode GETNUMKEYS."""
    return encode_plain(GETNUMKEYS)


def encode_list_keys() -> bytes:
    """Encode LIST_KEYS."""
    return encode_plain(LIST_KEYS)


# ---- answers, as the server sends them -----------------------------------------------------------


def encode_bytes(value: bytes) -> bytes:
    """Encode one string."""
    return _U64.pack(len(value)) + value


def encode_i64(number: int) -> bytes:
    """Encode a count or a sum."""
    return _I64.pack(number)


def encode_u32(number: int) -> bytes:
    """Encode PING's nonce."""
    return _U32.pack(number)


def encode_key_list(keys: Iterable[bytes]) -> bytes:
    """Encode LIST_KEYS' answer: an i64 count and the strings."""
    parts = [encode_bytes(key) for key in keys]
    return _I64.pack(len(parts)) + b"".join(parts)


# Answered with NOT_READY's 1 first by a server that keeps what follows a WAIT until that has ended
# (ours), with READY's 0 by one that answers at once (torch's): two bytes come either way, 1 0 or
# 0 1. The key has no "/" in front, so no user can set it.
ORDER_PROBE: Final = encode_wait([b"nc10d/order"]) + encode_check([]) + encode_cancel_wait()
