"""Dumps as torch's flight recorder writes them, for torch.distributed.flight_recorder.fr_trace.

Each rank gets a file: a pickle with plain lists and dictionaries. The analyser knows only torch's
names for calls and backends, so nc10d's calls appear under gloo's names.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nc10d.group.flight_recorder import COMPLETED, Dump, Entry

VERSION = "2.10"
_PREFIX = "rank_"
# The names under which torch records calls whose array is a rank's own part.
_NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
_DTYPES = {"float64": "Double", "float32": "Float", "int64": "Long", "int32": "Int"}


def write(dumps: Sequence[Dump], folder: Path) -> list[Path]:
    """Write a file for each rank; return the paths. Read them with --prefix rank_."""
    folder.mkdir(parents=True, exist_ok=True)
    by_rank: dict[int, list[Dump]] = {}
    for dump in dumps:
        by_rank.setdefault(dump.ranks[dump.rank], []).append(dump)
    paths = []
    for rank, own in sorted(by_rank.items()):
        path = folder / f"{_PREFIX}{rank}"
        path.write_bytes(pickle.dumps(record(own)))
        paths.append(path)
    return paths


def record(dumps: Sequence[Dump], library: str = "gloo") -> dict[str, Any]:
    """Return a rank's dumps, from all groups, in the format of torch's recorder.

    `library` begins the calls' names.
    """
    entries = [_entry(dump, entry, library) for dump in dumps for entry in dump.entries]
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    return {
        "version": VERSION,
        "pg_config": {
            dump.group: {"name": dump.group, "desc": dump.group, "ranks": str(dump.ranks)}
            for dump in dumps
        },
        "pg_status": {
            dump.group: {
                "last_enqueued_collective": dump.last.get(dump.rank, 0),
                "last_started_collective": dump.last.get(dump.rank, 0),
                "last_completed_collective": _completed(dump),
            }
            for dump in dumps
        },
        "entries": entries,
    }


def _completed(dump: Dump) -> int:
    """Return the latest ended call's number; calls before the record have ended."""
    calls = dump.calls
    begun = dump.last.get(dump.rank, 0)
    if not calls:
        return max(0, begun - (dump.waits_for is not None))
    ended = (entry.seq for entry in calls if entry.state == COMPLETED)
    return max(ended, default=calls[0].seq - 1)


def _entry(dump: Dump, entry: Entry, library: str) -> dict[str, Any]:
    inputs, outputs, dtype = _sizes(dump, entry)
    begun = int(dump.day(entry.begun)) if entry.begun else 0
    return {
        "frames": _frames(entry.site),
        "pg_id": 0,
        "process_group": (dump.group, dump.group),
        "collective_seq_id": 0 if entry.message else entry.seq,
        "p2p_seq_id": entry.seq if entry.message else 0,
        "op_id": entry.seq,
        "profiling_name": f"{library}:{_name(dump, entry)}",
        "time_created_ns": begun,
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": [dtype] if dtype else [],
        "output_dtypes": [dtype] if dtype else [],
        "state": entry.state,
        "time_discovered_started_ns": begun or None,
        "time_discovered_completed_ns": int(dump.day(entry.ended)) if entry.ended else None,
        "retired": entry.state == "completed",
        "timeout_ms": 0,
        "is_p2p": entry.message,
    }


def _name(dump: Dump, entry: Entry) -> str:
    """Return torch's name for an operation; a message's name contains the ranks."""
    peer = re.search(r"(?:dst|src)=(\d+)", entry.call) if entry.message else None
    if peer is None:
        return _NAMES.get(entry.op, entry.op)
    return f"{entry.op} {dump.rank}{'->' if entry.op == 'send' else '<-'}{peer[1]}"


def _frames(site: str) -> list[dict[str, Any]]:
    file, _, line = site.rpartition(":")
    return [{"name": "", "filename": file, "line": int(line)}] if line.isdigit() else []


def _sizes(dump: Dump, entry: Entry) -> tuple[list[list[int]], list[list[int]], str]:
    count = re.search(r"count=(\d+)", entry.call)
    dtype = re.search(r"dtype=(\w+)", entry.call)
    if count is None:
        return [[1]], [[1]], "Int"
    own = int(count[1])
    whole = own * dump.size
    sizes = {"all_gather": (own, whole), "reduce_scatter": (whole, own)}
    put, get = sizes.get(entry.op, (own, own))
    name = dtype[1] if dtype else ""
    return [[put]], [[get]], _DTYPES.get(name, name)
