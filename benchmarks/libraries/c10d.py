"""The code that nc10d and torch.distributed share: both have c10d's calls.

The shared calls are written once, in terms of a module and its arrays. `benchmarks.compare` uses
`start`, `bind` and `close`; `benchmarks.faults` forks ranks, which `join` a group of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.libraries.base import (
    Array,
    Call,
    Library,
    ObjectCall,
    as_object,
    both_ways,
    cut,
    there_and_back,
    uneven,
)

COLLECTIVES = 4
"""Kinds of collectives that `C10dLibrary.call` knows."""
HOST = "127.0.0.1"
WINDOW = 64
"""Asynchronous calls that are in flight at a time."""
Move = Callable[[], None]


def stay() -> None:
    """Keep this rank on its host."""


class C10dLibrary(Library):
    """A library with c10d's interface; each group of a scenario has a number of its own."""

    @property
    @abstractmethod
    def dist(self) -> Any:
        """The module with c10d's names."""

    @abstractmethod
    def tensor(self, array: Array) -> Any:
        """Return the library's array over the memory of an ndarray."""

    @abstractmethod
    def ones(self, count: int, dtype: str = "float32") -> Any:
        """Return an array of ones."""

    @abstractmethod
    def warm(self) -> None:
        """Load everything, in the process that forks the ranks."""

    @abstractmethod
    def join(self, number: int, rank: int, size: int, timeout: float, move: Move = stay) -> None:
        """Make a default group in a forked rank.

        `move` takes this rank to another host, after which it can't reach the rendezvous any more.
        """

    @abstractmethod
    def drop(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Make a group, use it, and drop it without destroying it."""

    @abstractmethod
    def shorten(self, timeout: float) -> None:
        """Set the default group's timeout to the scenario's; joining may take longer."""

    @abstractmethod
    def leave(self) -> None:
        """Destroy the group, unless that may block for ever."""

    @abstractmethod
    def serve(self, *, guarded: bool = False) -> tuple[object, int]:
        """Serve a store in this process; return its owner, and its port.

        `guarded` asks for the library's best protection against unauthenticated clients.
        """

    @abstractmethod
    def reach(self, port: int, timeout: float, *, guarded: bool = False) -> Any:
        """Return a client of a store on this host."""

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Return an error's type, message and attributes; `failed` is the rank that it names."""
        return {"kind": type(error).__name__, "message": str(error), "failed": None}

    def silence(self) -> None:
        """Stop this process from writing on the terminal, where the library does so."""

    def bind(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind the public calls to these arrays."""
        calls = c10d_calls(self.dist, self.rank, self.size, self.tensor(out), self.tensor(x))
        return calls | object_calls(self.dist, self.rank, self.size, out, x)

    def call(self, kind: int, count: int) -> None:
        """Make one of `COLLECTIVES` collectives on `count` elements."""
        dist, x = self.dist, self.ones(count)
        if kind == 0:
            dist.all_reduce(x)
        elif kind == 1:
            dist.broadcast(x, src=0)
        elif kind == 2:
            dist.all_gather_into_tensor(self.ones(count * dist.get_world_size()), x)
        else:
            dist.all_reduce(x, async_op=True).wait()

    def mismatching_calls(self) -> dict[str, Call]:
        """Return calls of which no two match when different ranks make them."""
        dist, ones = self.dist, self.ones
        size = dist.get_world_size()
        return {
            "all_reduce": lambda: dist.all_reduce(ones(4)),
            "all_reduce of another count": lambda: dist.all_reduce(ones(5)),
            "all_reduce of another dtype": lambda: dist.all_reduce(ones(4, "float64")),
            "all_reduce by another op": lambda: dist.all_reduce(ones(4), dist.ReduceOp.MAX),
            "all_reduce of far more": lambda: dist.all_reduce(ones(1 << 18)),
            "barrier": dist.barrier,
            "broadcast from 0": lambda: dist.broadcast(ones(4), 0),
            "broadcast from 1": lambda: dist.broadcast(ones(4), 1),
            "reduce to 0": lambda: dist.reduce(ones(4), 0),
            "reduce to 1": lambda: dist.reduce(ones(4), 1),
            "all_gather": lambda: dist.all_gather([ones(4) for _ in range(size)], ones(4)),
            "reduce_scatter": lambda: dist.reduce_scatter(ones(4), [ones(4) for _ in range(size)]),
            "all_to_all": lambda: dist.all_to_all_single(ones(4), ones(4)),
        }

    def begin(self, group: Any = None) -> Any:
        """Begin an operation that needs all ranks; return its Work."""
        return self.dist.all_reduce(self.ones(1000), group=group, async_op=True)

    def end(self) -> None:
        """Destroy the group in any case."""
        self.dist.destroy_process_group()


def c10d_calls(dist: Any, rank: int, size: int, out: Any, x: Any) -> dict[str, Call]:
    """Bind the calls that torch.distributed and nc10d spell in the same way; the root is rank 0."""
    peer = rank ^ 1
    into, parts = (pieces(y, size) if rank == 0 else None for y in (out, x))
    send, recv = partial(dist.send, x, peer), partial(dist.recv, out, peer)
    return {
        "all_reduce": partial(dist.all_reduce, out),
        "all_gather": partial(dist.all_gather_into_tensor, out, x),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, out, x),
        "broadcast": partial(dist.broadcast, out, 0),
        "reduce": partial(dist.reduce, out, 0),
        "gather": partial(dist.gather, x, into, 0),
        "scatter": partial(dist.scatter, out, parts, 0),
        "all_to_all": partial(dist.all_to_all_single, out, x),
        "ping_pong": there_and_back(send, recv, rank < peer),
        "exchange": both_ways(partial(dist.isend, x, peer), recv),
        "barrier": dist.barrier,
        **list_calls(dist, rank, size, out, x),
        **uneven_calls(dist, rank, size, out, x),
    }


def list_calls(dist: Any, rank: int, size: int, out: Any, x: Any) -> dict[str, Call]:
    """Bind the forms of calls that take a list with an array for each rank, and a window."""
    outs, parts = pieces(out, size), pieces(x, size)
    # On the root the whole is longer than the chunk of other ranks.
    received, given = (outs, parts) if rank == 0 else (None, None)
    return {
        "all_gather_list": partial(dist.all_gather, outs, x),
        "reduce_scatter_list": partial(dist.reduce_scatter, out, parts),
        "gather_list": partial(dist.gather, x, received, 0),
        "scatter_list": partial(dist.scatter, out, given, 0),
        "all_to_all_list": partial(dist.all_to_all, outs, parts),
        "window": partial(window, dist, out),
        "message_window": partial(message_window, dist, rank ^ 1, out, x),
    }


def uneven_calls(dist: Any, rank: int, size: int, out: Any, x: Any) -> dict[str, Call]:
    """Bind the calls with an array for each rank, each longer than that of the rank before."""
    outs, parts = (cut(y, uneven(len(y), size)) for y in (out, x))
    received, given = (outs, parts) if rank == 0 else (None, None)
    return {
        "all_gather_uneven": partial(dist.all_gather, outs, x),
        "reduce_scatter_uneven": partial(dist.reduce_scatter, out, parts),
        "gather_uneven": partial(dist.gather, x, received, 0),
        "scatter_uneven": partial(dist.scatter, out, given, 0),
        "all_to_all_uneven": partial(dist.all_to_all, pieces(out, size), parts),
    }


def object_calls(dist: Any, rank: int, size: int, out: Array, x: Array) -> dict[str, Call]:
    """Bind the object calls; the root is rank 0."""
    root, peer = rank == 0, rank ^ 1

    def all_gather(value: Any) -> list[Any]:
        places = [None] * size
        dist.all_gather_object(places, value)
        return places

    def gather(value: Any) -> list[Any] | None:
        places = [None] * size if root else None
        dist.gather_object(value, places, 0)
        return places

    def broadcast(value: Any) -> list[Any]:
        places = [value if root else None]
        dist.broadcast_object_list(places, 0)
        return places

    def scatter(values: Any) -> list[Any]:
        places = [None]
        dist.scatter_object_list(places, values, 0)
        return places

    def ping_pong(value: Any) -> list[Any]:
        places = [None]
        send = partial(dist.send_object_list, [value], peer)
        there_and_back(send, partial(dist.recv_object_list, places, peer), rank < peer)()
        return places

    value, given = as_object(x), [*map(as_object, pieces(x, size))] if root else None
    return {
        "all_gather_object": ObjectCall(out, value, all_gather),
        "gather_object": ObjectCall(out, value, gather),
        "broadcast_object": ObjectCall(out, value, broadcast),
        "scatter_object": ObjectCall(out, given, scatter),
        "ping_pong_object": ObjectCall(out, value, ping_pong),
    }


def pieces(array: Any, size: int) -> list[Any]:
    """Cut an array of the library into equal pieces, views of its memory."""
    return cut(array, [len(array) // size] * size)


def window(dist: Any, out: Any) -> None:
    """Launch all_reduces of WINDOW pieces of an array, and then wait for all."""
    works = [dist.all_reduce(piece, async_op=True) for piece in pieces(out, min(WINDOW, len(out)))]
    for work in works:
        work.wait()


def message_window(dist: Any, peer: int, out: Any, x: Any) -> None:
    """Receive WINDOW pieces from `peer`, and send it as many; then wait for all."""
    count = min(WINDOW, len(out))
    works = [dist.irecv(piece, peer) for piece in pieces(out, count)]
    works += [dist.isend(piece, peer) for piece in pieces(x, count)]
    for work in works:
        work.wait()
