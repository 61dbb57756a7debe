"""Objects by way of pickle, for senders and receivers who trust each other and say so.

Protocol 5 with buffers out of band: arrays inside travel as chunks, as the codec's own do.

    header    number of chunks (uint32), bytes of each (int64), the pickle
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

import numpy as np

from nc10d.codec.messages import Kind, Message, Payload
from nc10d.codec.tags import COUNT
from nc10d.errors import CodecError


def encode_pickled(value: Any) -> Message:
    """Pickle any object; raises whatever its own code raises."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    chunks = [np.asarray(buffer.raw()) for buffer in buffers]
    sizes = struct.pack(f"<{len(chunks)}q", *(chunk.nbytes for chunk in chunks))
    return Message(Kind.PICKLE, COUNT.pack(len(chunks)) + sizes + stream, chunks)


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
