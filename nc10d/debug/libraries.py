"""nc10d and torch's gloo, as the scenarios of faults use them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

COLLECTIVES = 4
_TOKEN = b"t" * 32
Move = Callable[[], None]


def _stay() -> None:
    """Don't move: all ranks are on one host."""


class Library(Protocol):
    """What scenarios need of a library; `calls` are by name, and each is made on the group."""

    name: str

    def warm(self) -> None:
        """Load everything, in the process that forks the ranks."""

    def join(self, number: int, rank: int, size: int, timeout: float, move: Move = _stay) -> None:
        """Make a default group; each has a `number` of its own.

        `move` takes this rank to another host, from which what its mates meet by is out of reach.
        """

    def call(self, kind: int, count: int) -> None:
        """Make one of `COLLECTIVES` collectives on `count` elements."""

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return calls of which no two fit together on different ranks."""

    def told(self, error: BaseException) -> dict[str, Any]:
        """Return what an error says, by attribute."""

    def begin(self) -> None:
        """Begin an operation that waits for the others."""

    def leave(self) -> None:
        """Destroy the group, unless that may wait for ever."""

    def end(self) -> None:
        """Destroy the group in any case."""

    def serve(self, *, guarded: bool = False) -> tuple[object, int]:
        """Serve a store in this process; return what keeps it, and its port.

        `guarded`: in the library's best way to keep strangers out.
        """

    def reach(self, port: int, timeout: float, *, guarded: bool = False) -> Any:
        """Return a client of a store on this host; it has `get` and `add`."""


class Nc10d:
    """nc10d's own engine; ranks meet in a store that outlives them."""

    name = "nc10d"

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
        """Make a default group; each has a `number` of its own."""
        import nc10d as dist

        store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", self._server.port))
        move()
        dist.init_process_group("cpu", store=store, rank=rank, world_size=size, timeout=timeout)

    def call(self, kind: int, count: int) -> None:
        """Make one of `COLLECTIVES` collectives on `count` elements."""
        import numpy as np

        import nc10d as dist

        x = np.ones(count)
        if kind == 0:
            dist.all_reduce(x)
        elif kind == 1:
            dist.broadcast(x, src=0)
        elif kind == 2:
            dist.all_gather_into_tensor(np.ones(count * dist.get_world_size()), x)
        else:
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return calls of which no two fit together on different ranks."""
        import numpy as np

        import nc10d as dist

        size, ones = dist.get_world_size(), np.ones
        return {
            "all_reduce": lambda: dist.all_reduce(ones(4)),
            "all_reduce of another count": lambda: dist.all_reduce(ones(5)),
            "all_reduce of another dtype": lambda: dist.all_reduce(ones(4, np.float32)),
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

    def told(self, error: BaseException) -> dict[str, Any]:
        """Return the error's type, message and attributes; whom it names is `failed`."""
        fields = {name: value for name, value in vars(error).items() if not name.startswith("_")}
        fields["failed"] = fields.pop("rank", None)
        return {"kind": type(error).__name__, "message": str(error), **fields}

    def begin(self) -> None:
        """Begin an operation that waits for the others."""
        import numpy as np

        import nc10d as dist

        dist.all_reduce(np.ones(1000), async_op=True)

    def leave(self) -> None:
        """Destroy the group."""
        import nc10d as dist

        dist.destroy_process_group()

    end = leave

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


class Gloo:
    """The same on torch.distributed with gloo."""

    name = "gloo"

    def warm(self) -> None:
        """Load torch, before ranks are forked."""
        import tempfile

        import torch

        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory()

    def join(self, number: int, rank: int, size: int, timeout: float, move: Move = _stay) -> None:
        """Make a default group; each has a `number` of its own."""
        from datetime import timedelta

        import torch.distributed as dist

        move()
        _hush()  # where it aborts, it says so on the terminal
        method = f"file://{self._folder.name}/{number}"
        dist.init_process_group("gloo", method, timedelta(seconds=timeout), size, rank)

    def call(self, kind: int, count: int) -> None:
        """Make one of `COLLECTIVES` collectives on `count` elements."""
        import torch
        import torch.distributed as dist

        x = torch.ones(count)
        if kind == 0:
            dist.all_reduce(x)
        elif kind == 1:
            dist.broadcast(x, src=0)
        elif kind == 2:
            dist.all_gather([torch.ones(count) for _ in range(dist.get_world_size())], x)
        else:
            dist.all_reduce(x, async_op=True).wait()

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return calls of which no two fit together on different ranks."""
        import torch
        import torch.distributed as dist

        size, ones = dist.get_world_size(), torch.ones
        double = torch.float64
        return {
            "all_reduce": lambda: dist.all_reduce(ones(4)),
            "all_reduce of another count": lambda: dist.all_reduce(ones(5)),
            "all_reduce of another dtype": lambda: dist.all_reduce(ones(4, dtype=double)),
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

    def told(self, error: BaseException) -> dict[str, Any]:
        """Return the error's type and message: it has no attributes."""
        return {"kind": type(error).__name__, "message": str(error), "failed": None}

    def leave(self) -> None:
        """Do nothing: a group of gloo that has failed may wait for ever in its end."""

    def begin(self) -> None:
        """Begin an operation that waits for the others."""
        import torch
        import torch.distributed as dist

        self._begun = dist.all_reduce(torch.ones(1000), async_op=True)

    def end(self) -> None:
        """Destroy the group."""
        import torch.distributed as dist

        dist.destroy_process_group()

    def serve(self, *, guarded: bool = False) -> tuple[object, int]:
        """Serve a store in this process; it knows no tokens."""
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        return store, store.port

    def reach(self, port: int, timeout: float, *, guarded: bool = False) -> Any:
        """Return a client of a store on this host."""
        from datetime import timedelta

        import torch.distributed as dist

        _hush()  # it says on the terminal what it does not get
        limit = timedelta(seconds=timeout)
        return dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)


def _hush() -> None:
    """Let this process say nothing on the terminal any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


LIBRARIES: dict[str, type[Library]] = {"nc10d": Nc10d, "gloo": Gloo}
