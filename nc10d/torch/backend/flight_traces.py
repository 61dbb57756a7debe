"""torch's functions that dump flight records, for nc10d's groups, on torch 2.15 and newer.

torch attaches a recorder to each group of a backend that does not record. On nc10d that recorder
would repeat the records that nc10d keeps in any case, cost more than a small call, and never see an
operation's end. So nc10d counts as a backend that records, and the functions that take the
backend's name give nc10d's records. torch's debug server reads recorders in C++ alone: for its
pages, a program attaches torch's recorder by `FlightRecorderHook.attach(group)`.

With TORCH_FR_DUMP_TEMP_FILE set, a rank also writes its records when a group fails, as torch does.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as _c10d

from nc10d.base.signal_errors import suppress_here
from nc10d.base.torch_registration import GLOO, NAME, GloosPlace
from nc10d.debug import torch_trace
from nc10d.errors import DistError
from nc10d.group.flight_recorder import FlightRecorder, write_or_warn
from nc10d.torch.backend.python_backend import PythonBackend, living
from nc10d.torch.backend.torch_versions import SELF_RECORDING

_log = logging.getLogger(__name__)
FILE = "TORCH_FR_DUMP_TEMP_FILE"


def _is_ours(backend: str) -> bool:
    """Return whether the records of a backend, by its name in torch, are nc10d's."""
    return backend == NAME or (backend == GLOO and isinstance(_c10d.ProcessGroupGloo, GloosPlace))


def _records(collectives: bool | None, frames: bool | None, active: bool | None) -> dict[str, Any]:
    """Return this rank's records; None stands for torch's defaults: all but `active`."""
    dumps = []
    for group in [backend.nc10d_group for backend in living()]:
        for device, backend in [*group._backends.ready.items()]:
            with suppress_here(DistError):  # the group has been aborted, or is the parent process's
                if backend.call_records is not None:
                    dumps.append(FlightRecorder(group, device).dump())
    found = torch_trace.record(dumps, NAME)
    entries = [] if collectives is False else found["entries"]
    found["entries"] = [entry for entry in entries if not (active and entry["retired"])]
    for entry in found["entries"] if frames is False else ():
        del entry["frames"]
    return found


def _dump_fr_trace(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
    backend: str = "gloo",
) -> object:
    if not _is_ours(backend):
        return NotImplemented
    return pickle.dumps(_records(includeCollectives, includeStackTraces, onlyActive))


def _dump_fr_trace_json(
    includeCollectives: bool | None = None, onlyActive: bool | None = None, backend: str = "gloo"
) -> object:
    if not _is_ours(backend):
        return NotImplemented
    return json.dumps(_records(includeCollectives, False, onlyActive)).encode()


def _dump_fr_trace_file(
    rank: int,
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
    backend: str = "gloo",
) -> object:
    if not _is_ours(backend):
        return NotImplemented
    default = Path.home() / ".cache" / "torch" / "comm_lib_trace_rank_"
    path = Path(f"{os.environ.get(FILE) or default}{rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(_records(includeCollectives, includeStackTraces, onlyActive)))
    return None


Function = Callable[..., object]
FUNCTIONS = (_dump_fr_trace, _dump_fr_trace_json, _dump_fr_trace_file)


def install(
    passing_on: Callable[[Callable[..., object], Callable[..., object]], Callable[..., object]],
) -> None:
    """Have torch's functions give nc10d's records; again: no change. None on torch before 2.15."""
    if not SELF_RECORDING or NAME in SELF_RECORDING:
        return
    SELF_RECORDING.add(NAME)
    for own in FUNCTIONS:
        theirs = getattr(_c10d, own.__name__)
        setattr(_c10d, own.__name__, passing_on(own, theirs))


def dump_on_failure(backend: PythonBackend) -> None:
    """Have the rank write its records when the group fails, if the environment says where to."""
    if not SELF_RECORDING or not os.environ.get(FILE):
        return

    # torch may have no default group yet when the group fails.
    rank = backend.nc10d_group.global_rank(backend.nc10d_group.rank())

    def dump(_: DistError) -> None:
        write_or_warn(partial(_dump_fr_trace_file, rank, backend=NAME), os.environ.get(FILE))

    backend.observe_failure(dump)
