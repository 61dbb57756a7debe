"""nc10d and torch's gloo, as the scenarios of faults use them.

Both speak c10d: what they have in common is written once, in terms of a module and its arrays.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

COLLECTIVES = 4
_TOKEN = b"t" * 32
Call = Callable[[], object]
Move = Callable[[], None]


def _stay() -> None:
    """Don't move: all ranks are on one host."""


class Library(ABC):
    """What scenarios need of a library; groups have numbers, each another one."""

    name: str

    @property
    @abstractmethod
    def dist(self) -> Any:
        """The module with c10d's names."""

    @abstractmethod
    def ones(self, count: int, dtype: str = "float32") -> Any:
        """Return an array of ones."""

    @abstractmethod
    def warm(self) -> None:
        """Load everything, in the process that forks the ranks."""

    @abstractmethod
    def join(self, number: int, rank: int, size: int, timeout: float, move: Move = _stay) -> None:
        """Make a default group.

        `move` takes this rank to another host, from which what its mates meet by is out of reach.
        """

    @abstractmethod
    def drop(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Make a group, use it, and drop it without destroying it."""

    @abstractmethod
    def shorten(self, timeout: float) -> None:
        """Give the default group the timeout of the scenario: to join may take longer."""

    @abstractmethod
    def told(self, error: BaseException) -> dict[str, Any]:
        """Return what an error says, by attribute."""

    @abstractmethod
    def leave(self) -> None:
        """Destroy the group, unless that may wait for ever."""

    @abstractmethod
    def serve(self, *, guarded: bool = False) -> tuple[object, int]:
        """Serve a store in this process; return what keeps it, and its port.

        `guarded`: in the library's best way to keep strangers out.
        """

    @abstractmethod
    def reach(self, port: int, timeout: float, *, guarded: bool = False) -> Any:
        """Return a client of a store on this host; it has `get` and `add`."""

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

    def calls(self) -> dict[str, Call]:
        """Return calls of which no two fit together on different ranks."""
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
        """Begin an operation that waits for the others; return its Work."""
        return self.dist.all_reduce(self.ones(1000), group=group, async_op=True)

    def end(self) -> None:
        """Destroy the group in any case."""
        self.dist.destroy_process_group()


class Nc10d(Library):
    """nc10d's own engine; ranks meet in a store that outlives them."""

    name = "nc10d"

    @property
    def dist(self) -> Any:
        """The package."""
        import nc10d

        return nc10d

    def ones(self, count: int, dtype: str = "float32") -> Any:
        """Return an ndarray."""
        import numpy as np

        return np.ones(count, dtype)

    def warm(self) -> None:
        """Compile or load what ranks run, before they are forked."""
        from nc10d.store import TCPStore
        from nc10d.testing import run_ranks

        def once(_: Any) -> None:
            for kind in range(COLLECTIVES):
                self.call(kind, 5_000)

        run_ranks(once, 2)
        self._server = TCPStore("127.0.0.1", 0, is_master=True)

    def join(self, number: int, rank: int, size: int, timeout: float, move: Move = _stay) -> None:
        """Make a default group."""
        dist = self.dist
        store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", self._server.port))
        move()
        dist.init_process_group("cpu", store=store, rank=rank, world_size=size, timeout=timeout)

    def drop(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Make a group of a world of its own, and drop both."""
        from nc10d.group.world import own_world

        with own_world():
            self.join(number, rank, size, timeout)
            self.call(3, 1000)

    def shorten(self, timeout: float) -> None:
        """Give the default group another timeout."""
        self.dist.get_default_group().timeout = timeout

    def told(self, error: BaseException) -> dict[str, Any]:
        """Return the error's type, message and attributes; whom it names is `failed`."""
        fields = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        fields["failed"] = fields.pop("rank", None)
        return {"kind": type(error).__name__, "message": str(error), **fields}

    leave = Library.end

    def serve(self, *, guarded: bool = False) -> tuple[object, int]:
        """Serve a store in this process; return what keeps it, and its port."""
        from nc10d.store import TCPStore

        token = _TOKEN if guarded else None
        store = TCPStore("127.0.0.1", 0, is_master=True, server="thread", token=token)
        return store, store.port

    def reach(self, port: int, timeout: float, *, guarded: bool = False) -> Any:
        """Return a client of a store on this host."""
        from nc10d.store import TCPStore

        token = _TOKEN if guarded else None
        return TCPStore("127.0.0.1", port, timeout=timeout, token=token)


class Gloo(Library):
    """The same on torch.distributed with gloo."""

    name = "gloo"

    @property
    def dist(self) -> Any:
        """torch.distributed."""
        import torch.distributed

        return torch.distributed

    def ones(self, count: int, dtype: str = "float32") -> Any:
        """Return a tensor."""
        import torch

        return torch.ones(count, dtype=getattr(torch, dtype))

    def warm(self) -> None:
        """Load torch, before ranks are forked."""
        import tempfile

        import torch

        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory()

    def join(self, number: int, rank: int, size: int, timeout: float, move: Move = _stay) -> None:
        """Make a default group."""
        from datetime import timedelta

        move()
        _hush()  # where it aborts, it says so on the terminal
        method = f"file://{self._folder.name}/{number}"
        limit = timedelta(seconds=timeout)
        self.dist.init_process_group("gloo", method, limit, size, rank)

    def drop(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Make a bare ProcessGroupGloo, and drop it: the module keeps those that it makes."""
        from datetime import timedelta

        store = self.dist.FileStore(f"{self._folder.name}/{number}", size)
        limit = timedelta(seconds=timeout)
        group = self.dist.ProcessGroupGloo(store, rank, size, timeout=limit)
        group.allreduce(self.ones(1000)).wait()

    def shorten(self, timeout: float) -> None:
        """Give the default group another timeout."""
        from datetime import timedelta

        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(timedelta(seconds=timeout), self.dist.group.WORLD)

    def told(self, error: BaseException) -> dict[str, Any]:
        """Return the error's type and message: it has no attributes."""
        return {"kind": type(error).__name__, "message": str(error), "failed": None}

    def leave(self) -> None:
        """Do nothing: a group of gloo that has failed may wait for ever in its end."""

    def serve(self, *, guarded: bool = False) -> tuple[object, int]:
        """Serve a store in this process; it knows no tokens."""
        store = self.dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        return store, store.port

    def reach(self, port: int, timeout: float, *, guarded: bool = False) -> Any:
        """Return a client of a store on this host."""
        from datetime import timedelta

        _hush()  # it says on the terminal what it does not get
        limit = timedelta(seconds=timeout)
        return self.dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)


def _hush() -> None:
    """Let this process say nothing on the terminal any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


LIBRARIES: dict[str, type[Library]] = {"nc10d": Nc10d, "gloo": Gloo}
