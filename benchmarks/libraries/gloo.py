"""torch.distributed over gloo, by its public calls on tensors."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from functools import partial
from typing import Any

from benchmarks.libraries.base import Array, Call, uneven
from benchmarks.libraries.c10d import HOST, C10dLibrary, Move, stay


class Gloo(C10dLibrary):
    """torch.distributed with gloo; its tensors share the arrays' memory."""

    name = "gloo"

    @property
    def torch(self) -> Any:
        """The package torch."""
        import torch

        return torch

    @property
    def dist(self) -> Any:
        """torch.distributed."""
        import torch.distributed

        return torch.distributed

    def start(self) -> None:
        """Join the launcher's job; torch computes with a single thread."""
        self.torch.set_num_threads(1)
        self.dist.init_process_group("gloo")
        self.rank, self.size = self.dist.get_rank(), self.dist.get_world_size()

    def close(self) -> None:
        """Leave the group, and the process: its results are on disk."""
        self.dist.destroy_process_group()
        # After messages among four ranks torch 2.13 blocks for ever in the interpreter's exit.
        os._exit(0)

    def bind(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind c10d's calls; gloo exchanges lists in its single form only."""
        calls = super().bind(out, x)
        sizes = [len(out) // self.size] * self.size, uneven(len(x), self.size)
        tensors = self.tensor(out), self.tensor(x)
        single = partial(self.dist.all_to_all_single, *tensors, *sizes)
        return calls | {"all_to_all_list": calls["all_to_all"], "all_to_all_uneven": single}

    def tensor(self, array: Array) -> Any:
        """Return a tensor over the memory of an array."""
        return self.torch.from_numpy(array)

    def ones(self, count: int, dtype: str = "float32") -> Any:
        """Return a tensor."""
        return self.torch.ones(count, dtype=getattr(self.torch, dtype))

    def warm(self) -> None:
        """Load torch, before ranks are forked."""
        self.torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory()

    def join(self, number: int, rank: int, size: int, timeout: float, move: Move = stay) -> None:
        """Make a default group."""
        move()
        self.silence()  # an abort is announced on the terminal
        method = f"file://{self._folder.name}/{number}"
        self.dist.init_process_group("gloo", method, timedelta(seconds=timeout), size, rank)

    def drop(self, number: int, rank: int, size: int, timeout: float) -> None:
        """Make a bare ProcessGroupGloo, and drop it: the module keeps the groups that it makes."""
        store = self.dist.FileStore(f"{self._folder.name}/{number}", size)
        limit = timedelta(seconds=timeout)
        group = self.dist.ProcessGroupGloo(store, rank, size, timeout=limit)
        group.allreduce(self.ones(1000)).wait()

    def shorten(self, timeout: float) -> None:
        """Change the default group's timeout."""
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(timedelta(seconds=timeout), self.dist.group.WORLD)

    def leave(self) -> None:
        """Do nothing: destroying a failed group of gloo may block for ever."""

    def serve(self, *, guarded: bool = False) -> tuple[object, int]:
        """Serve a store in this process; torch's store has no tokens."""
        store = self.dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
        return store, store.port

    def reach(self, port: int, timeout: float, *, guarded: bool = False) -> Any:
        """Return a client of a store on this host."""
        limit = timedelta(seconds=timeout)
        return self.dist.TCPStore(HOST, port, None, False, limit, wait_for_workers=False)

    def silence(self) -> None:
        """Send this process's error output nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
