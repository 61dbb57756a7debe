"""From a request's arrays to addresses: contiguous memory, and what to copy back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.backend.cpu.native import engine
from nc10d.backend.cpu.requests import Request
from nc10d.buffer import Buffer


@dataclass(slots=True)
class Resolved:
    """Addresses in the program's order, what keeps them valid, and what to do at the end."""

    addresses: list[int]
    keep: list[Any]
    after: list[Callable[[], None]]


def resolve(request: Request) -> Resolved:
    """Return the memory of a request; strided arrays go through a contiguous copy and back."""
    resolved = Resolved([], [], [])
    for number, array in enumerate(request.arrays):
        if not isinstance(array, Buffer):
            resolved.addresses.append(engine.address(array))
            resolved.keep.append(array)
        elif array.contiguous:
            resolved.addresses.append(array.address)
            resolved.keep.append(array.owner)
        else:
            through_copy(array, number in request.outs, resolved)
    return resolved


def through_copy(buffer: Buffer, written: bool, resolved: Resolved) -> None:
    """Use a contiguous copy of a strided array; if it is written, copy it back at the end."""
    view = buffer.as_numpy()
    copy = np.ascontiguousarray(view)
    resolved.addresses.append(engine.address(copy))
    resolved.keep += [copy, buffer.owner]
    if written:
        resolved.after.append(lambda: np.copyto(view, copy))
