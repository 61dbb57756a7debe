"""From arrays to addresses: where a program's arrays lie, and what keeps them alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nc10d.backend.cpu.native import arrays as plain
from nc10d.backend.cpu.requests import Request
from nc10d.backend.cpu.strided import shape_words
from nc10d.buffer import Buffer


@dataclass(slots=True)
class Resolved:
    """Addresses in the program's order, and what keeps them valid."""

    addresses: list[int] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)


def resolve(request: Request) -> Resolved:
    """Return the memory of a request that has been straightened."""
    resolved = Resolved()
    for array in request.arrays:
        if isinstance(array, Buffer):
            resolved.addresses.append(array.address)
            resolved.keep.append(array.owner)
        else:
            resolved.addresses.append(plain.address(array))
            resolved.keep.append(array)
    return resolved


def resolve_message(buffer: Buffer) -> Resolved:
    """Return the memory of a message; a strided array comes with a copy and its shape."""
    if buffer.contiguous:
        return Resolved([buffer.address], [buffer.owner])
    copy, shape = np.empty(buffer.nbytes, np.uint8), shape_words(buffer)
    addresses = [plain.address(copy), buffer.address, plain.address(shape)]
    return Resolved(addresses, [copy, buffer.owner, shape])
