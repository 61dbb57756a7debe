"""How two processes of a job prove to each other that both know a key; no I/O.

The process that connects is the caller, the other the answerer. Three messages:

    caller:   its rank, the peer's rank, group and purpose, and a nonce       (84 bytes)
    answerer: its nonce, and its proof                                        (64 bytes)
    caller:   its proof                                                       (32 bytes)

A proof is the HMAC-SHA256 (RFC 2104) of a label and of all earlier messages, nonces included, so a
proof holds for this connection, these ranks and this group only. The key itself never travels. Two
more HMACs give a key for each direction. With such a key a Sealer and an Opener frame the data that
follows: a length, a counter, the bytes, and the first 16 bytes of the HMAC of these three.

A message that breaks a rule raises BadHandshake or BadSeal; the connection must then be closed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from hmac import compare_digest, digest
from struct import Struct
from typing import NamedTuple

MAGIC = b"nc10d-2\n"
NONCE_BYTES = PROOF_BYTES = 32
HELLO = Struct("<8sIII32s32s")
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
UNPROVEN_BYTES = HELLO.size + PROOF_BYTES
"""The most bytes that are read from an unproven connection: 116."""

FRAME = Struct("<IQ")
SEAL_BYTES = 16
LONGEST_FRAME = 64 << 10


class BadHandshake(Exception):
    """The other side does not know the key, or speaks another protocol."""


class BadSeal(Exception):
    """A frame is not the next frame that the other side has sent."""


class Introduction(NamedTuple):
    """The caller's rank, its peer, the purpose, and the group (a name's `group_digest`)."""

    rank: int
    peer: int
    purpose: int
    group: bytes


class Keys(NamedTuple):
    """A connection's keys, as seen from this end."""

    sending: bytes
    taking: bytes


def group_digest(name: str) -> bytes:
    """Return the digest of a group's name, 32 bytes, that a handshake carries."""
    return hashlib.sha256(name.encode()).digest()


class HandshakeCaller:
    """The side that connects: send `hello`, feed the answer, send the bytes that `feed` returns."""

    def __init__(self, key: bytes, introduction: Introduction) -> None:
        self._key = key
        self.hello = HELLO.pack(MAGIC, *introduction, os.urandom(NONCE_BYTES))
        self._held = b""
        self.keys: Keys | None = None

    @property
    def wants(self) -> int:
        """How many bytes are still to come; 0 once the other side has proved itself."""
        return 0 if self.keys else ANSWER_BYTES - len(self._held)

    def feed(self, data: bytes) -> bytes:
        """Take at most `wants` bytes of the answer; return the bytes to send, perhaps none."""
        self._held += data
        if self.wants:
            return b""
        nonce, shown = self._held[:NONCE_BYTES], self._held[NONCE_BYTES:]
        transcript = self.hello + nonce
        if not compare_digest(shown, _proof(self._key, b"answerer", transcript)):
            raise BadHandshake("it does not know the key")
        back, forth = _keys(self._key, transcript)
        self.keys = Keys(forth, back)
        return _proof(self._key, b"caller", transcript)


class HandshakeAnswerer:
    """The side that is called: feed the received bytes, send the bytes that `feed` returns.

    `accepts(introduction)` returns whether this process expects such a caller.
    """

    def __init__(self, key: bytes, accepts: Callable[[Introduction], bool]) -> None:
        self._key = key
        self._accepts = accepts
        self._held = b""
        self._transcript = b""
        self.introduction: Introduction | None = None
        self.keys: Keys | None = None

    @property
    def wants(self) -> int:
        """How many bytes are still to come; 0 once the other side has proved itself."""
        if self.keys:
            return 0
        return (PROOF_BYTES if self._transcript else HELLO.size) - len(self._held)

    def feed(self, data: bytes) -> bytes:
        """Take at most `wants` bytes; return the bytes to send, perhaps none."""
        self._held += data
        if not self._transcript and not MAGIC.startswith(self._held[: len(MAGIC)]):
            raise BadHandshake("it speaks another language")
        if self.wants:
            return b""
        whole, self._held = self._held, b""
        return self._check(whole) if self._transcript else self._answer(whole)

    def _answer(self, hello: bytes) -> bytes:
        _, rank, peer, purpose, group, _ = HELLO.unpack(hello)
        self.introduction = Introduction(rank, peer, purpose, group)
        if not self._accepts(self.introduction):
            raise BadHandshake("nobody of that description is awaited")
        nonce = os.urandom(NONCE_BYTES)
        self._transcript = hello + nonce
        return nonce + _proof(self._key, b"answerer", self._transcript)

    def _check(self, shown: bytes) -> bytes:
        if not compare_digest(shown, _proof(self._key, b"caller", self._transcript)):
            raise BadHandshake("it does not know the key")
        self.keys = Keys(*_keys(self._key, self._transcript))
        return b""


def _proof(key: bytes, label: bytes, transcript: bytes) -> bytes:
    return digest(key, label + b"\0" + transcript, "sha256")


def _keys(key: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    """Return the key for data from the answerer, and the key for data from the caller."""
    answerer = _proof(key, b"from the answerer", transcript)
    return answerer, _proof(key, b"from the caller", transcript)


def seal_function(key: bytes) -> Callable[[bytes | memoryview], bytes]:
    """Return a function that seals a frame: HMAC-SHA256 under a key of 32 bytes, cut to 16 bytes.

    The two hash states that depend on the key alone are computed once (RFC 2104, section 4).
    """
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded)).copy
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded)).copy

    def seal(data: bytes | memoryview) -> bytes:
        within, around = inner(), outer()
        within.update(data)
        around.update(within.digest())
        return around.digest()[:SEAL_BYTES]

    return seal


class Sealer:
    """Frames the data that this side sends."""

    __slots__ = ("_count", "_seal")

    def __init__(self, key: bytes) -> None:
        self._seal = seal_function(key)
        self._count = 0

    def seal(self, data: bytes | memoryview) -> bytes:
        """Return `data` as one or more frames."""
        if len(data) <= LONGEST_FRAME:
            return self._frame(data)
        cuts = range(0, len(data), LONGEST_FRAME)
        view = memoryview(data)
        return b"".join([self._frame(view[at : at + LONGEST_FRAME]) for at in cuts])

    def _frame(self, data: bytes | memoryview) -> bytes:
        body = FRAME.pack(len(data), self._count) + data
        self._count += 1
        return body + self._seal(body)


class Opener:
    """Opens frames; returns only data that the other side has sent, in the order sent."""

    __slots__ = ("_count", "_held", "_seal")

    def __init__(self, key: bytes) -> None:
        self._seal = seal_function(key)
        self._count = 0
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes, in any pieces; return the data of the frames that are now complete.

        BadSeal if a frame was changed, left out, repeated or forged; none of its data is returned.
        """
        if self._held:
            data = self._held + data
        at, parts = 0, []
        while len(data) - at >= FRAME.size:
            length, count = FRAME.unpack_from(data, at)
            if length > LONGEST_FRAME or count != self._count:
                raise BadSeal("a frame that is not the next one")
            middle = at + FRAME.size + length
            end = middle + SEAL_BYTES
            if end > len(data):
                break
            if not compare_digest(self._seal(data[at:middle]), data[middle:end]):
                raise BadSeal("a frame whose seal is wrong")
            parts.append(data[at + FRAME.size : middle])
            self._count += 1
            at = end
        self._held = data[at:]
        return parts[0] if len(parts) == 1 else b"".join(parts)
