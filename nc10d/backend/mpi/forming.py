"""How ranks come together for a group: with a deadline, which MPI's own calls lack.

MPI makes communicators in calls that block until all have come, for ever if need be, and a waiting
MPI may hold its core. So the ranks first tell the group's first rank that they are there, by
messages that can be waited for; it answers when all have come, and MPI's call is over at once.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d.backend.mpi.library import MPI, Comm, Request, keep
from nc10d.backend.mpi.message_queue import RESERVED_TAGS, largest_tag
from nc10d.backend.mpi.progress_thread import SLICE, YIELDS, engine
from nc10d.base.deadline import Deadline
from nc10d.errors import RendezvousError

_LONGEST = 4096  # bytes of what ranks tell each other
_REFUSED = b"!"
_never = threading.Event()


def wait_for_members(
    comm: Comm,
    members: Sequence[int],
    name: str,
    deadline: Deadline,
    mine: bytes = b"",
    answer: Callable[[Sequence[bytes]], bytes] = lambda _: b"",
) -> bytes:
    """Wait until all `members`, ranks of `comm`, have called with `name`; return the answer.

    The first of them computes it from what all have brought (`mine`), by rank, and tells the others
    what it raises. RendezvousError names who has not come by `deadline`.
    """
    # Groups that are formed at the same time should have different tags.
    tag = largest_tag() - zlib.crc32(name.encode()) % RESERVED_TAGS
    if comm.rank == members[0]:
        return _lead(comm, members, name, deadline, mine, answer, tag)
    _send(comm, mine, members[0], tag)
    with engine.lock:
        told, request = _receive(comm, members[0], tag)
    if not _wait([request], deadline)[0]:
        raise RendezvousError(f"group {name!r}: rank {members[0]} of {comm.size} has not come")
    text: bytes = told.tobytes().rstrip(b"\0")
    if text.startswith(_REFUSED):
        raise RendezvousError(text[1:].decode(errors="replace"))
    return text


def _lead(
    comm: Comm,
    members: Sequence[int],
    name: str,
    deadline: Deadline,
    mine: bytes,
    answer: Callable[[Sequence[bytes]], bytes],
    tag: int,
) -> bytes:
    others = members[1:]
    with engine.lock:
        told = [_receive(comm, member, tag) for member in others]
    came = _wait([request for _, request in told], deadline)
    present = [member for member, here in zip(others, came, strict=True) if here]
    absent = [member for member in others if member not in present]
    try:
        if absent:
            raise RendezvousError(f"group {name!r}: ranks {absent} have not come in time")
        text = answer([mine, *(data.tobytes().rstrip(b"\0") for data, _ in told)])
    except Exception as error:
        for member in present:
            _send(comm, _REFUSED + str(error).encode(), member, tag)
        raise
    for member in others:
        _send(comm, text, member, tag)
    return text


def _send(comm: Comm, text: bytes, peer: int, tag: int) -> None:
    data = np.frombuffer(text[:_LONGEST], np.uint8)
    with engine.lock:
        request = comm.Isend(data, peer, tag)
        if not request.Test():
            keep((request, data))


def _receive(comm: Comm, peer: int, tag: int) -> tuple[Any, Request]:
    told = np.zeros(_LONGEST, np.uint8)
    return told, comm.Irecv(told, peer, tag)


def _wait(requests: Sequence[Request], deadline: Deadline) -> list[bool]:
    """Wait until all requests are over; at the deadline, take back those that are not.

    Other groups go on meanwhile: somebody may have to finish a call there before coming here.
    """
    done = [False] * len(requests)
    looks = 0
    while True:
        with engine.lock:
            for place, request in enumerate(requests):
                done[place] = done[place] or bool(request.Test())
        if all(done) or deadline.expired():
            break
        engine.advance()
        looks += 1
        if looks < YIELDS:
            os.sched_yield()
        else:
            _never.wait(SLICE)  # MPI wakes nobody
    with engine.lock:
        for place, request in enumerate(requests):
            if not done[place]:
                request.Cancel()
                status = MPI.Status()
                request.Wait(status)
                done[place] = not status.Is_cancelled()
    return done
