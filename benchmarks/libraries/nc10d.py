"""nc10d, by its public calls on plain arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.libraries.base import Array, Call
from benchmarks.libraries.c10d import COLLECTIVES, HOST, C10dLibrary, Move, stay

_TOKEN = b"t" * 32


class Nc10d(C10dLibrary):
    """nc10d's own engine; forked ranks rendezvous in a store that outlives them."""

    name = "nc10d"

    @property
    def dist(self) -> Any:
        """The package."""
        import nc10d

        return nc10d

    def start(self) -> None:
        """Join the launcher's job."""
        self.dist.init_process_group()
        self.rank, self.size = self.dist.get_rank(), self.dist.get_world_size()

    def close(self) -> None:
        """Leave the group."""
        self.dist.destroy_process_group()

    def bind(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind c10d's calls, and those that c10d lacks."""
        exchange = partial(self.dist.sendrecv, x, self.rank ^ 1, out, self.rank ^ 1)
        scans = {"scan": partial(self.dist.scan, out), "exscan": partial(self.dist.exscan, out)}
        return super().bind(out, x) | {"exchange": exchange, **scans}

    def tensor(self, array: Array) -> Any:
        """Return the ndarray itself."""
        return array

    def ones(self, count: int, dtype: str = "float32") -> Any:
        """Return an ndarray."""
        return np.ones(count, dtype)

    def warm(self) -> None:
        """Compile or load the collectives' code, before ranks are forked."""
        from nc10d.testing import run_ranks

        def once(_: Any) -> None:
            for kind in range(COLLECTIVES):
                self.call(kind, 5_000)

        run_ranks(once, 2)
        self._server = self.dist.TCPStore(HOST, 0, is_master=True)

    def join(self, number: int, rank: int, size: int, timeout: float, move: Move = stay) -> None:
        """Make a default group."""
        dist = self.dist
        store = dist.PrefixStore(str(number), dist.TCPStore(HOST, self._server.port))
        move()
        dist.init_process_group("cpu", store=store, rank=rank, world_size=size, timeout=timeout)

    def drop(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Make a group in a separate world, and drop both."""
        from nc10d.group.world import own_world

        with own_world():
            self.join(number, rank, size, timeout)
            self.call(3, 1000)

    def shorten(self, timeout: float) -> None:
        """Change the default group's timeout."""
        self.dist.get_default_group().timeout = timeout

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Return the error's type, message and attributes; `failed` is the rank that it names."""
        fields = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        failed = fields.pop("rank", None)
        return {**super().describe(error), **fields, "failed": failed}

    leave = C10dLibrary.end

    def serve(self, *, guarded: bool = False) -> tuple[object, int]:
        """Serve a store in a thread of this process; return it, and its port."""
        token = _TOKEN if guarded else None
        store = self.dist.TCPStore(HOST, 0, is_master=True, server="thread", token=token)
        return store, store.port

    def reach(self, port: int, timeout: float, *, guarded: bool = False) -> Any:
        """Return a client of a store on this host."""
        return self.dist.TCPStore(HOST, port, timeout=timeout, token=_TOKEN if guarded else None)
