"""How long operations would take, by NCCL's own model of the machine; nothing is sent.

ncclGroupSimulateEnd (NCCL 2.22) tells the time for a group's last bundle: operations of the same
kind whose sizes differ by less than four times (ncclPrepareTasks in NCCL's enqueue.cc). So each
such bundle is simulated alone, and the times are added.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.bindings.header_table import FUNCTIONS, HEADER_VERSION
from nc10d.backend.nccl.bindings.library import SIM_MAGIC, SimInfo, version_code
from nc10d.backend.nccl.comm.comm_streams import COLLECTIVES
from nc10d.backend.nccl.launch.nccl_calls import Call
from nc10d.base.deadline import Deadline
from nc10d.ops import Op
from nc10d.ops.facts import name_of

_SIMULATE = "ncclGroupSimulateEnd"
_NO_MODEL = ("ncclSend", "ncclRecv")
_BUNDLE = 4  # times as much


def check_estimates(backend: NcclBackend) -> None:
    """Raise UnsupportedPlatform or ValueError if this group's operations can't be simulated."""
    backend.library.require(FUNCTIONS[_SIMULATE].since, "an estimate of times")
    if backend.nonblocking:
        # NCCL runs a nonblocking group on a thread that knows no simulation (group.cc).
        raise ValueError("an estimate of times needs blocking communicators: NCCL would launch")


def seconds_of(backend: NcclBackend, ops: Sequence[Op], deadline: Deadline) -> float:
    """Return NCCL's estimate for operations in seconds.

    The first call in a group blocks until all ranks have formed the communicator; later calls are
    this rank's alone. ValueError for messages, and operations that consist of messages.
    """
    check_estimates(backend)
    backend.started.check()
    comm = backend.started.formed(COLLECTIVES, deadline)
    main = backend.started.comm_streams.find(COLLECTIVES)
    assert main is not None, "formed just now"
    library, microseconds = backend.library, 0.0
    calls = backend.started.calls(ops)
    for op, own in zip(ops, calls, strict=True):
        if any(call[0] in _NO_MODEL for call in own):
            raise ValueError(f"{name_of(op)}: NCCL estimates collectives, not messages")
    with comm.lock, comm.enter():
        for bundle in _bundles([call for own in calls for call in own]):
            found = SimInfo(ctypes.sizeof(SimInfo), SIM_MAGIC, version_code(HEADER_VERSION))
            library.call("ncclGroupStart")
            codes = [
                library.function(call[0])(*call[1:], comm.handle, main.stream) for call in bundle
            ]
            codes.append(library.function(_SIMULATE)(ctypes.byref(found)))
            for code in codes:
                library.check(code, _SIMULATE)
            microseconds += found.estimatedTime
    return microseconds / 1e6


def _bundles(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Yield the calls that NCCL may bundle: of one kind, with counts of like size."""
    kinds: dict[tuple[object, ...], list[Call]] = {}
    for call in calls:
        kinds.setdefault((call[0], *call[4:]), []).append(call)
    for alike in kinds.values():
        bundle: list[Call] = []
        for call in sorted(alike, key=lambda call: int(call[3])):
            if bundle and call[3] >= _BUNDLE * bundle[0][3]:
                yield bundle
                bundle = []
            bundle.append(call)
        yield bundle
