"""An object's message: an opening and, if that has not room for all, a flat array.

    opening   kind, bytes of header, bytes of payload, number (int64 each), then `flat` if there is
              room, or (place, bytes) for each long chunk
    flat      header, payload, zeros
    payload   the chunks (arrays, long byte strings), each from a multiple of 64 bytes on

A small object travels in one operation, whose size every rank knows. A message to a single rank has
only an opening's used pieces; their number follows from the words in the first. The header is small
and describes the chunks. The chunks are the user's memory, and are copied once, into the flat
array. Long chunks follow uncopied, each into separate memory; a long chunk's place is the payload
byte before which it comes. The flat array's size is rounded up, so that messages with similar
objects have the same size: a backend prepares a program for each size that it meets.

Between two ranks only the first piece travels with tag 0. The rest has a tag made from the number.
So a message arrives whole, even if several threads send to a rank or receive there.

In a scatter each rank receives its own opening alone. If any message is longer than an opening,
all ranks receive TABLE_FOLLOWS instead, then all ranks' openings, then the arrays in rounds,
whose number follows from the openings.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nc10d.base.error_wire import message_of
from nc10d.codec.decoder import Array, Bytes, Locate, Payload, aligned, decode, decoded, rounded
from nc10d.codec.plain import decode_plain
from nc10d.codec.tags import COUNT
from nc10d.errors import CodecError

OPENING, PIECE = 4096, 1024
"""The bytes in an opening, and in a piece.

A link's cell has room for a piece: a sender can be as far ahead as with other small messages.
"""
WORDS = struct.Struct("<4q")
"""An opening's words."""
NUMBER, NUMBER_AT = struct.Struct("<q"), 24
"""The number in an opening, and the byte at which that begins."""
FIRST_LATER_TAG = 2**62
"""The later pieces have this tag plus the message's number. Programs should use lower tags."""
_ROOM = OPENING - WORDS.size
"""The bytes in an opening behind the words."""
LARGEST = 2**40
"""The most bytes that an envelope may announce: every rank refuses the same envelopes."""
LONG = 1 << 20
"""A chunk of so many bytes or more travels by itself: a copy would take longer than a message."""
_PLACE = struct.Struct("<2q")
_KIND = 256
"""An opening's first word is the kind, plus this many times the number of long chunks."""
_LONGEST_REASON = 2000


class MessageKind(enum.IntEnum):
    """A message's encoding."""

    CODEC = 1
    PICKLE = 2
    FAILED = 3
    PLAIN = 4
    TABLE_FOLLOWS = 5
    """In a scatter, no object: the openings for all ranks follow."""


class Envelope(NamedTuple):
    """A message's kind and sizes, which travel ahead to every rank.

    `long` has each long chunk's place and bytes; the payload has all other chunks.
    """

    kind: MessageKind
    header: int
    payload: int
    long: tuple[tuple[int, int], ...] = ()

    @classmethod
    def read(cls, opening: Bytes) -> Envelope:
        """Return a received opening's envelope; CodecError if no sender would send it."""
        word, header, payload, _ = WORDS.unpack_from(opening.data)
        count, kind = divmod(word, _KIND)
        if kind not in _KINDS or min(header, payload) < 0 or not 0 <= count <= _ROOM // _PLACE.size:
            raise CodecError(f"no message has the kind and sizes {word}, {header}, {payload}")
        if count == 0 and header + payload <= LARGEST:
            return cls(_KINDS[kind], header, payload)
        long = tuple(_PLACE.iter_unpack(opening.data[WORDS.size :][: count * _PLACE.size]))
        found = cls(_KINDS[kind], header, payload, long)
        places = [place for place, _ in long]
        fits = places == sorted(places) and (not places or 0 <= places[0] <= places[-1] <= payload)
        if not fits or any(nbytes <= 0 for _, nbytes in long) or found.total > LARGEST:
            raise CodecError(f"no message has the kind and sizes {tuple(found[:4])}")
        return found

    @property
    def parts(self) -> int:
        """How many arrays follow the opening."""
        return 0 if self.inline else 1 + len(self.long)

    @property
    def total(self) -> int:
        """The bytes of header and all chunks."""
        return self.header + self.payload + sum(nbytes for _, nbytes in self.long)

    @property
    def inline(self) -> bool:
        """Whether the opening has the whole message."""
        return not self.long and _fits(self.header, self.payload)

    @property
    def nbytes(self) -> int:
        """The flat array's size."""
        return rounded(aligned(self.header) + self.payload)

    def inner(self, opening: Bytes) -> Bytes:
        """Return the flat array in an opening that has it; arrays get separate memory."""
        flat = opening[WORDS.size :]
        return flat.copy() if self.payload else flat

    def open(
        self,
        flat: Bytes,
        *,
        allow_pickle: bool = False,
        locate: Locate = None,
        long: Sequence[Bytes] = (),
    ) -> Any:
        """Return the object, whose arrays are views of `flat` where that wastes little memory.

        `long` are the long chunks, which become arrays as they are.

        CodecError for a pickle unless `allow_pickle`, for a sender that could not encode the
        object, and for a malformed message.
        """
        if self.kind is MessageKind.PLAIN:
            return decode_plain(flat[: self.header], locate)
        start = aligned(self.header)
        if not self.payload:  # an array without elements does not keep the opening's memory
            flat = flat[: self.header].copy()
        places = [(place, chunk) for (place, _), chunk in zip(self.long, long, strict=True)]
        header = flat[: self.header].data
        payload = Payload(flat[start : start + self.payload], places)
        if self.kind is MessageKind.FAILED:
            raise CodecError(bytes(header).decode(errors="replace"))
        if self.kind is MessageKind.TABLE_FOLLOWS:
            raise CodecError("the mark of a scatter has come where an object is expected")
        if self.kind is MessageKind.CODEC:
            return decode(header, payload, locate)
        if not allow_pickle:
            raise CodecError(
                "a pickle has come, which can run any code and was not looked at: the sender "
                "called with allow_pickle=True; do so here too if you trust it (or set "
                "NC10D_ALLOW_PICKLE=1)"
            )
        return decode_pickled(header, payload)


_KINDS = {int(kind): kind for kind in MessageKind}


def _together(header: int, payload: int) -> int:
    """Return the bytes of header and payload, one behind the other."""
    return aligned(header) + payload if payload else header


def _fits(header: int, payload: int) -> bool:
    """Return whether an opening has room for a message."""
    return _together(header, payload) <= _ROOM


def cut(opening: Bytes) -> list[Bytes]:
    """Return an opening's pieces."""
    return [opening[at : at + PIECE] for at in range(0, OPENING, PIECE)]


def pieces_used(first: Bytes) -> int:
    """Return how many of an opening's pieces are used, by the words in the first."""
    word, header, payload, _ = WORDS.unpack_from(first.data)
    count = word // _KIND
    used = WORDS.size + (count * _PLACE.size if count else _together(header, payload))
    return -(-used // PIECE) if WORDS.size <= used <= OPENING else 1


def later_tag(first: Bytes) -> int:
    """Return the tag for all pieces of a message after the first."""
    number: int = NUMBER.unpack_from(first.data, NUMBER_AT)[0]
    return FIRST_LATER_TAG + number % FIRST_LATER_TAG


class EncodedMessage:
    """An object to send: `chunks` are the user's arrays, which must not change until it is sent."""

    __slots__ = ("_places", "chunks", "header", "kind", "long", "payload")

    def __init__(self, kind: MessageKind, header: bytes, chunks: Sequence[Array] = ()) -> None:
        self.kind, self.header, self.chunks = kind, header, chunks
        self.payload = sum([aligned(chunk.nbytes) for chunk in chunks]) if chunks else 0
        """The chunks' bytes, gaps included, but for chunks that travel by themselves."""
        self.long: list[Bytes] = []
        """The chunks that travel by themselves, as bytes; see `divide`."""
        self._places: tuple[tuple[int, int], ...] = ()

    @classmethod
    def failed(cls, reason: BaseException) -> EncodedMessage:
        """Return the message that reports to receivers why there is no object."""
        text = f"{type(reason).__name__}: {message_of(reason)}"[:_LONGEST_REASON]
        return cls(MessageKind.FAILED, text.encode(errors="replace"))

    def divide(self) -> None:
        """Let long chunks travel by themselves."""
        if self.payload < LONG:
            return
        short: list[Array] = []
        places: list[tuple[int, int]] = []
        at = 0
        for chunk in self.chunks:
            if chunk.nbytes >= LONG and len(places) < _ROOM // _PLACE.size:
                self.long.append(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))
                places.append((at, chunk.nbytes))
            else:
                short.append(chunk)
                at += aligned(chunk.nbytes)
        self.chunks, self.payload, self._places = short, at, tuple(places)

    def envelope(self) -> Envelope:
        """Return the envelope, which travels before the message."""
        return Envelope(self.kind, len(self.header), self.payload, self._places)

    @property
    def inline(self) -> bool:
        """Whether the opening has the whole message."""
        return not self.long and _fits(len(self.header), self.payload)

    def opening(self) -> Bytes:
        """Return the opening, with the whole message if there is room."""
        block = bytearray(OPENING)
        word = self.kind + _KIND * len(self.long)
        WORDS.pack_into(block, 0, word, len(self.header), self.payload, 0)
        if self.inline:
            at = WORDS.size
            for part in (self.header, *(chunk.tobytes() for chunk in self.chunks)):
                block[at : at + len(part)] = part
                at += aligned(len(part))
        for number, place in enumerate(self._places):
            _PLACE.pack_into(block, WORDS.size + number * _PLACE.size, *place)
        return np.frombuffer(block, np.uint8)

    def flat(self) -> Bytes:
        """Return header and chunks copied into a flat array; gaps are zeros, not old memory."""
        flat = np.empty(self.envelope().nbytes, np.uint8)
        size = len(self.header)
        flat.data[:size] = self.header
        at = aligned(size) if self.chunks else size
        flat[size:at] = 0
        for chunk in self.chunks:
            at = _copy_chunk(flat, at, chunk)
        flat[at:] = 0
        return flat


def _copy_chunk(flat: Bytes, at: int, chunk: Array) -> int:
    """Copy a chunk with any strides into `flat`; return the start of the next chunk."""
    end, following = at + chunk.nbytes, at + aligned(chunk.nbytes)
    np.copyto(flat[at:end].view(chunk.dtype).reshape(chunk.shape), chunk)
    flat[end:following] = 0
    return following


def encode_pickled(value: object) -> EncodedMessage:
    """Pickle any object; an exception from the object's own code is passed on."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    chunks = [np.asarray(buffer.raw()) for buffer in buffers]
    sizes = struct.pack(f"<{len(chunks)}q", *(chunk.nbytes for chunk in chunks))
    return EncodedMessage(MessageKind.PICKLE, COUNT.pack(len(chunks)) + sizes + stream, chunks)


def decode_pickled(header: memoryview, payload: Payload) -> Any:
    """Unpickle, which can run any code that the sender chose; CodecError for every failure."""
    return decoded("a pickle can't be read", _unpickled, header, payload)


def _unpickled(header: memoryview, payload: Payload) -> Any:
    count = COUNT.unpack_from(header)[0]
    start = COUNT.size + 8 * count
    sizes = struct.unpack_from(f"<{count}q", header, COUNT.size)
    chunks = [payload.take(nbytes) for nbytes in sizes]
    payload.finish()
    return pickle.loads(header[start:], buffers=chunks)
