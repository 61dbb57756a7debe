"""What travels for one object: three words that say what comes, then one flat array of bytes.

    words     kind, bytes of header, bytes of payload
    flat      header, payload, zeros
    payload   the chunks (arrays, long byte strings), each from a multiple of 64 bytes on

The header is small and says what the chunks are; the chunks are user's memory, copied once, to
where they travel. The flat array is a little longer than it need be, so that messages of similar
objects have the same size: a backend prepares itself for each size that it meets.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.base.error_wire import in_words
from nc10d.codec.payload import Array, Bytes, Locate, Payload, aligned, rounded
from nc10d.codec.tags import COUNT
from nc10d.errors import CodecError

WORDS = 3
LARGEST = 2**40
"""Bytes that a message may claim to have: every rank refuses the same claims."""
_LONGEST_REASON = 2000


class MessageKind(enum.IntEnum):
    """How a message is to be read."""

    CODEC = 1
    PICKLE = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known of a message before it comes: all ranks that see it know the same."""

    kind: MessageKind
    header: int
    payload: int

    @classmethod
    def read(cls, words: Sequence[int]) -> Envelope:
        """Take the words off the wire; CodecError if no sender of ours would send them."""
        kind, header, payload = (int(word) for word in words)
        if kind not in _KINDS or min(header, payload) < 0 or header + payload > LARGEST:
            raise CodecError(f"no message has the kind and sizes {kind}, {header}, {payload}")
        return cls(MessageKind(kind), header, payload)

    @property
    def nbytes(self) -> int:
        """The size of the flat array."""
        return rounded(aligned(self.header) + self.payload)

    def parts(self, flat: Bytes) -> tuple[memoryview, Payload]:
        """Return header and payload, both views of `flat`."""
        start = aligned(self.header)
        return flat[: self.header].data, Payload(flat[start : start + self.payload])

    def open(self, flat: Bytes, *, allow_pickle: bool = False, locate: Locate = None) -> Any:
        """Return the object; its arrays are views of `flat` where that wastes little memory.

        CodecError for a pickle unless `allow_pickle`, for a message that its sender could not
        make, and for one that is malformed.
        """
        from nc10d.codec import decoder, messages  # they read what is laid out here

        header, payload = self.parts(flat)
        if self.kind is MessageKind.FAILED:
            raise CodecError(bytes(header).decode(errors="replace"))
        if self.kind is MessageKind.CODEC:
            return decoder.decode(header, payload, locate)
        if not allow_pickle:
            raise CodecError(
                "a pickle has come, which can run any code and was not looked at: the sender "
                "called with allow_pickle=True; do so here too if you trust it"
            )
        return messages.decode_pickled(header, payload)


_KINDS = frozenset(int(kind) for kind in MessageKind)


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """An object on its way out: `chunks` are the user's arrays, which must not change meanwhile."""

    kind: MessageKind
    header: bytes
    chunks: Sequence[Array] = ()

    @classmethod
    def failed(cls, reason: BaseException) -> EncodedMessage:
        """Return what tells the others that there is no object, and why."""
        text = f"{type(reason).__name__}: {in_words(reason)}"[:_LONGEST_REASON]
        return cls(MessageKind.FAILED, text.encode(errors="replace"))

    def envelope(self) -> Envelope:
        """Return what goes before it."""
        payload = sum(aligned(chunk.nbytes) for chunk in self.chunks)
        return Envelope(self.kind, len(self.header), payload)

    def words(self) -> npt.NDArray[np.int64]:
        """Return the envelope as it travels."""
        envelope = self.envelope()
        return np.array([envelope.kind, envelope.header, envelope.payload], np.int64)

    def flat(self) -> Bytes:
        """Copy header and chunks to where they travel; gaps hold zeros, not old memory."""
        flat = np.empty(self.envelope().nbytes, np.uint8)
        at = _put(flat, 0, np.frombuffer(self.header, np.uint8))
        for chunk in self.chunks:
            at = _put(flat, at, chunk)
        flat[at:] = 0
        return flat


def _put(flat: Bytes, at: int, chunk: Array) -> int:
    """Copy a chunk of any strides; return where the next one begins."""
    end, following = at + chunk.nbytes, at + aligned(chunk.nbytes)
    np.copyto(flat[at:end].view(chunk.dtype).reshape(chunk.shape), chunk)
    flat[end:following] = 0
    return following


def encode_pickled(value: Any) -> EncodedMessage:
    """Pickle any object; raises whatever its own code raises."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    chunks = [np.asarray(buffer.raw()) for buffer in buffers]
    sizes = struct.pack(f"<{len(chunks)}q", *(chunk.nbytes for chunk in chunks))
    return EncodedMessage(MessageKind.PICKLE, COUNT.pack(len(chunks)) + sizes + stream, chunks)


def decode_pickled(header: memoryview, payload: Payload) -> Any:
    """Unpickle, which runs whatever code the sender chose; CodecError for all that goes wrong."""
    try:
        count = COUNT.unpack_from(header)[0]
        start = COUNT.size + 8 * count
        sizes = struct.unpack_from(f"<{count}q", header, COUNT.size)
        chunks = [payload.take(nbytes) for nbytes in sizes]
        payload.finish()
        return pickle.loads(header[start:], buffers=chunks)
    except CodecError:
        raise
    except Exception as error:  # a pickle runs code, which may raise anything
        raise CodecError(f"a pickle can't be read: {type(error).__name__}: {error}") from error
