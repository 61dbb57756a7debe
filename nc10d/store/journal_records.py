"""The records of a FileStore's file as bytes, without I/O.

The file begins with HEADER, and records follow. A record is the length and the checksum of a
request (wire.py), a checksum of these two, and the request. A writer that dies leaves the beginning
of a record at the file's end: an intact length that goes beyond the end. Every other change of a
record is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from zlib import crc32

from nc10d.store import wire as m

HEADER = b"nc10d FileStore 2\n"
_LENGTH, _CHECKSUM = Struct("<QI"), Struct("<I")
_HEAD_BYTES = _LENGTH.size + _CHECKSUM.size
_UNBOUNDED = m.Limits(key=1 << 40, value=1 << 40, total=1 << 50, items=1 << 40)


def record(request: bytes) -> bytes:
    """Encode a request as a record."""
    head = _LENGTH.pack(len(request), crc32(request))
    return head + _CHECKSUM.pack(crc32(head)) + request


def records(data: bytearray, position: int) -> Iterator[tuple[m.Request, int]]:
    """Yield the requests of the complete records in `data`, each with the record's end.

    `position` is that of `data` in the file. BadFrame for a damaged record, and at position 0 for
    a file that is none of this version's FileStore.
    """
    at = 0
    if position == 0:
        at = len(HEADER)
        if not HEADER.startswith(data[:at]):
            raise m.BadFrame("it is no file of this version's FileStore")
    while (begin := at + _HEAD_BYTES) <= len(data):
        head = data[at : at + _LENGTH.size]
        length, checksum = _LENGTH.unpack(head)
        intact = _CHECKSUM.unpack_from(data, at + _LENGTH.size) == (crc32(head),)
        if intact and begin + length > len(data):
            return
        request = bytes(data[begin : begin + length]) if intact else b""
        if not intact or crc32(request) != checksum:
            raise m.BadFrame(f"the record at byte {position + at} is damaged; remove the file")
        at = begin + length
        yield _parsed(request), at


def _parsed(data: bytes) -> m.Request:
    parser = m.Parser(_UNBOUNDED)
    parser.validated = True
    requests = [*parser.feed(data)]
    if len(requests) != 1 or parser.held:
        raise m.BadFrame("a record is no single request")
    return requests[0]
