"""The interface of an adapter for a benchmark: collectives bound to arrays, ready to be called.

`bind(out, x)` prepares every collective for two flat float32 arrays. An adapter does there all that
a program does only once (tensors over the arrays' memory, MPI's descriptions of buffers). The timed
call is then the library's own function, without a wrapper.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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


class ObjectCall:
    """A call that exchanges objects; `store` writes the objects of the last call to `out`.

    `call(value)` returns the objects that came; `value` is a list of floats up to SMALL bytes, else
    a dict with the array itself.
    """

    SMALL = 1 << 10

    def __init__(self, out: Array, value: Any, call: Callable[[Any], Any]) -> None:
        self._out, self._value, self._call = out, value, call
        self._found: Any = ()

    def __call__(self) -> None:
        """Make the call."""
        self._found = self._call(self._value)

    def store(self) -> None:
        """Write the objects' elements to `out`, one after the other."""
        arrays = [each["x"] if isinstance(each, dict) else each for each in self._found or ()]
        if arrays:
            self._out[:] = np.concatenate([np.asarray(each, self._out.dtype) for each in arrays])


def as_object(x: Array) -> Any:
    """Return the object of an array; see ObjectCall."""
    return x.tolist() if x.nbytes <= ObjectCall.SMALL else {"x": x}


def uneven(count: int, size: int) -> list[int]:
    """Return sizes for `size` ranks that grow with the rank, and add up to `count`."""
    ends = [count * (rank * (rank + 1)) // (size * (size + 1)) for rank in range(size + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def cut(array: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a library's array into pieces of these sizes, views of its memory."""
    ends = [0, *itertools.accumulate(sizes)]
    return [array[start:end] for start, end in itertools.pairwise(ends)]


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
