"""The payload of a message: chunks, each aligned to 64 bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.errors import CodecError

Array = np.ndarray[Any, np.dtype[Any]]


Bytes = npt.NDArray[np.uint8]


_ALIGN = 64


def aligned(nbytes: int) -> int:
    """Return the next multiple of 64."""
    return -(-nbytes // _ALIGN) * _ALIGN


def rounded(nbytes: int) -> int:
    """Round `nbytes` up by at most 1/16 or 63: to one of 16 sizes between powers of two.

    >>> rounded(1), rounded(5000), rounded(1 << 20)
    (64, 5120, 1048576)
    """
    step = max(_ALIGN, 1 << max(0, (nbytes - 1).bit_length() - 5))
    return -(-nbytes // step) * step


class Payload:
    """The chunks of a received message, taken in their order."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._at = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the whole payload."""
        return self._memory.size

    def take(self, nbytes: int) -> Bytes:
        """Return the next chunk, a view; CodecError if fewer bytes are left."""
        if not 0 <= nbytes <= self._memory.size - self._at:
            left = self._memory.size - self._at
            raise CodecError(f"the header asks for {nbytes} bytes, and the payload has {left}")
        chunk = self._memory[self._at : self._at + nbytes]
        self._at += aligned(nbytes)
        return chunk

    def finish(self) -> None:
        """Raise CodecError if bytes are left."""
        if self._at < self._memory.size:
            raise CodecError(f"the header leaves {self._memory.size - self._at} bytes of payload")


Locate = Callable[[Any], Any] | None
"""A function that replaces each received array (map_location), or None."""
