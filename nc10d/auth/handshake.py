"""How two processes of a job prove to each other that they know a key; no I/O.

The one that connects is the Caller, the other the Answerer. Three messages:

    caller:   who I am, to whom, in which group, for what, and a nonce        (84 bytes)
    answerer: its nonce, and its proof                                        (64 bytes)
    caller:   its proof                                                       (32 bytes)

A proof is the HMAC-SHA256 (RFC 2104) of a label and of all that was said before, nonces included,
so it holds for this connection, these ranks and this group only. The key itself never travels. Two
more HMACs give a key for each direction, by which a Sealer and an Opener frame what follows: a
length, a counter, the bytes, and the first 16 bytes of the HMAC of these three.

Whatever breaks a rule is a BadHandshake or a BadSeal; the connection is of no use any more.
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
STRANGER_BYTES = HELLO.size + PROOF_BYTES
"""All that is ever read of somebody who has not proved anything: 116 bytes."""
STRANGER_SECONDS = 2.0
"""How long somebody may take who has not proved anything."""

FRAME = Struct("<IQ")
SEAL_BYTES = 16
LONGEST_FRAME = 64 << 10


class BadHandshake(Exception):
    """The other side does not know the key, or is no part of this at all."""


class BadSeal(Exception):
    """A frame is not the one that the other side has sent next."""


class Introduction(NamedTuple):
    """Who calls whom, in which group (a name's `group_digest`), for which purpose."""

    rank: int
    peer: int
    purpose: int
    group: bytes


class Keys(NamedTuple):
    """The keys of one connection, as one of its ends uses them."""

    sending: bytes
    taking: bytes


def group_digest(name: str) -> bytes:
    """Return what stands for a group's name in a handshake."""
    return hashlib.sha256(name.encode()).digest()


class HandshakeCaller:
    """The side that connects: send `hello`, feed the answer, send what that returns."""

    def __init__(self, key: bytes, who: Introduction) -> None:
        self._key = key
        self.hello = HELLO.pack(MAGIC, *who, os.urandom(NONCE_BYTES))
        self._held = b""
        self.keys: Keys | None = None

    @property
    def wants(self) -> int:
        """How many bytes are still to come; 0 once the other side has proved itself."""
        return 0 if self.keys else ANSWER_BYTES - len(self._held)

    def feed(self, data: bytes) -> bytes:
        """Take at most `wants` bytes of the answer; return what to send, perhaps nothing."""
        self._held += data
        if self.wants:
            return b""
        nonce, shown = self._held[:NONCE_BYTES], self._held[NONCE_BYTES:]
        said = self.hello + nonce
        if not compare_digest(shown, _proof(self._key, b"answerer", said)):
            raise BadHandshake("it does not know the key")
        back, forth = _keys(self._key, said)
        self.keys = Keys(forth, back)
        return _proof(self._key, b"caller", said)


class HandshakeAnswerer:
    """The side that is called: feed what comes, send what that returns.

    `accepts` says whether somebody with that introduction is awaited at all.
    """

    def __init__(self, key: bytes, accepts: Callable[[Introduction], bool]) -> None:
        self._key = key
        self._accepts = accepts
        self._held = b""
        self._said = b""
        self.who: Introduction | None = None
        self.keys: Keys | None = None

    @property
    def wants(self) -> int:
        """How many bytes are still to come; 0 once the other side has proved itself."""
        if self.keys:
            return 0
        return (PROOF_BYTES if self._said else HELLO.size) - len(self._held)

    def feed(self, data: bytes) -> bytes:
        """Take at most `wants` bytes; return what to send, perhaps nothing."""
        self._held += data
        if not self._said and not MAGIC.startswith(self._held[: len(MAGIC)]):
            raise BadHandshake("it speaks another language")
        if self.wants:
            return b""
        whole, self._held = self._held, b""
        return self._check(whole) if self._said else self._answer(whole)

    def _answer(self, hello: bytes) -> bytes:
        _, rank, peer, purpose, group, _ = HELLO.unpack(hello)
        self.who = Introduction(rank, peer, purpose, group)
        if not self._accepts(self.who):
            raise BadHandshake("nobody of that description is awaited")
        nonce = os.urandom(NONCE_BYTES)
        self._said = hello + nonce
        return nonce + _proof(self._key, b"answerer", self._said)

    def _check(self, shown: bytes) -> bytes:
        if not compare_digest(shown, _proof(self._key, b"caller", self._said)):
            raise BadHandshake("it does not know the key")
        self.keys = Keys(*_keys(self._key, self._said))
        return b""


def _proof(key: bytes, label: bytes, said: bytes) -> bytes:
    return digest(key, label + b"\0" + said, "sha256")


def _keys(key: bytes, said: bytes) -> tuple[bytes, bytes]:
    """Return the keys of what the answerer sends, and of what the caller sends."""
    return _proof(key, b"from the answerer", said), _proof(key, b"from the caller", said)


def seal_under(key: bytes) -> Callable[[bytes | memoryview], bytes]:
    """Return what makes the seal of a frame: HMAC-SHA256 under a key of 32 bytes, cut short.

    The states that the key alone determines are made once (RFC 2104, section 4): a call takes a
    third of the time of `hmac.digest`.
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
    """Frames what one side sends."""

    __slots__ = ("_count", "_seal")

    def __init__(self, key: bytes) -> None:
        self._seal = seal_under(key)
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
    """Takes frames apart; gives out nothing that the other side has not sent, in its order."""

    __slots__ = ("_count", "_held", "_seal")

    def __init__(self, key: bytes) -> None:
        self._seal = seal_under(key)
        self._count = 0
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes, cut anywhere; return what the frames carry that are now whole.

        BadSeal if a frame was changed, left out, repeated or made up; nothing of it is returned.
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
