"""Save and load the state of a job whose ranks are alike, by one file on rank 0.

    save({"model": model.state_dict(), "step": step}, "state.pt")
    model.load_state_dict(load("state.pt")["model"])

Contract: every rank of the group calls, and blocks until the file is complete, or read. Rank 0
alone touches the file, so hosts need not share a disk. A file is complete or not there: rank 0
writes it beside the place and renames it. What rank 0 cannot do is an error on every rank. The
format is torch.save's.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nc10d.group.host_calls import on_host
from nc10d.group.process_group import ProcessGroup
from nc10d.torch.backend.groups import AnyGroup, own_group


def save(state: object, path: str | os.PathLike[str], group: AnyGroup | None = None) -> None:
    """Write rank 0's `state` to a file; other ranks may pass anything.

    Every rank raises an OSError if rank 0 cannot write the file, or another error of torch.save.
    """
    where, found = Path(path), own_group(group)
    problem = None
    if found.rank == 0:
        # Beside the place, since a file cannot be renamed to another disk.
        unfinished = where.with_name(f".{where.name}.{os.getpid()}")
        try:
            torch.save(state, unfinished)
            os.replace(unfinished, where)
        except Exception as error:  # noqa: BLE001  (every rank raises the error)
            unfinished.unlink(missing_ok=True)
            problem = error
    _agree(found, problem, f"write {where}")


def load(
    path: str | os.PathLike[str],
    map_location: object = "cpu",
    weights_only: bool = True,
    group: AnyGroup | None = None,
) -> Any:
    """Return, on every rank, the object in rank 0's file.

    Tensors are put on the CPU, or as `map_location` says. Unless `weights_only` is False, a file
    that would run code is refused. Errors are those of `save` and torch.load.
    """
    where, found = Path(path), own_group(group)
    size, data, problem = np.zeros(1, np.int64), np.zeros(0, np.uint8), None
    if found.rank == 0:
        try:
            data = np.fromfile(where, np.uint8)
        except OSError as error:
            problem = error
        size[0] = len(data)
    _agree(found, problem, f"read {where}")
    on_host(found).broadcast(size, 0)
    if found.rank:
        data = np.empty(int(size[0]), np.uint8)
    on_host(found).broadcast(data, 0)
    return torch.load(io.BytesIO(data.data), map_location=map_location, weights_only=weights_only)


def _agree(group: ProcessGroup, problem: Exception | None, what: str) -> None:
    """Raise rank 0's problem on every rank: the error itself there, an OSError elsewhere."""
    text = np.frombuffer(f"{type(problem).__name__}: {problem}".encode(), np.uint8).copy()
    size = np.array([0 if problem is None else len(text)], np.int64)
    on_host(group).broadcast(size, 0)
    if not size[0]:
        return
    if group.rank:
        text = np.empty(int(size[0]), np.uint8)
    on_host(group).broadcast(text, 0)
    if problem is not None:
        raise problem
    raise OSError(f"rank 0 could not {what}: {text.tobytes().decode()}")
