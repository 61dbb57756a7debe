"""The interface of an adapter for a benchmark: collectives bound to arrays, ready to be called.

`bind(out, x)` prepares every collective for two flat float32 arrays. An adapter does there all that
a program does only once (tensors over the arrays' memory, MPI's descriptions of buffers). The timed
call is then the library's own function, without a wrapper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], object]


class Library(ABC):
    """A library on one rank of a job.

    all_reduce and broadcast work in place on `out`; other collectives read `x`. Messages go between
    neighbours: ranks 0 and 1, 2 and 3, and so on.
    """

    name: str
    rank: int
    size: int

    @abstractmethod
    def start(self) -> None:
        """Join the job that the launcher has started; sets `rank` and `size`."""

    @abstractmethod
    def bind(self, out: Array, x: Array) -> dict[str, Call]:
        """Return every collective, bound to these arrays."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job."""


def there_and_back(send: Call, recv: Call, first: bool) -> Call:
    """Return a round trip: the `first` rank sends, and its neighbour answers."""
    earlier, later = (send, recv) if first else (recv, send)

    def trip() -> None:
        earlier()
        later()

    return trip


def both_ways(isend: Callable[[], Any], recv: Call) -> Call:
    """Return an exchange: both ranks send before either receives."""

    def exchange() -> None:
        work = isend()
        recv()
        work.wait()

    return exchange
