"""Arrival of ranks: in a job, and before MPI makes a communicator, with a deadline that MPI lacks.

MPI makes communicators in calls that block until all ranks have arrived, perhaps for ever, and a
waiting MPI may hold its core. So each rank first sends a message to the group's first rank, which
answers when all have arrived. Then MPI's call returns at once.

MPI itself needs no store; groups have a store for their users and for other backends. For a job
without any, rank 0 hosts a store on a free port, and sends the address to the others over MPI.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from nc10d.backend.mpi.library import MPI, Comm, Request, require_threads
from nc10d.backend.mpi.message_queue import RESERVED_TAGS, largest_tag
from nc10d.backend.mpi.mpi_group import engine
from nc10d.backend.polled.flat_buffers import keep
from nc10d.backend.polled.progress_thread import POLL_SECONDS, YIELDS
from nc10d.base.deadline import Deadline
from nc10d.base.signal_errors import Event
from nc10d.base.text import ranks_text
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError
from nc10d.store import HashStore, TCPStore
from nc10d.store.base import Store

_MAX_BYTES = 4096  # of a message
_REFUSED = b"!"
_MAX_TIMEOUT = 10.0 * 365 * 86400  # seconds; a socket takes no infinite timeout
_no_event = Event()


def wait_for_members(
    comm: Comm,
    members: Sequence[int],
    name: str,
    deadline: Deadline,
    own_text: bytes = b"",
    answer: Callable[[Sequence[bytes]], bytes] = lambda _: b"",
    check: Callable[[], None] = lambda: None,
) -> bytes:
    """Wait until all `members`, ranks of `comm`, have called with `name`; return the answer."""
    # The first member computes it by `answer` from the texts of all, by rank, and sends it to the
    # others, or its error. RendezvousError names the ranks that have not arrived by `deadline`.
    # `check` is called meanwhile; it may raise to end the wait.
    # Different tags for groups that are formed at the same time.
    tag = largest_tag() - zlib.crc32(name.encode()) % RESERVED_TAGS
    if comm.rank == members[0]:
        return _collect(comm, members, name, deadline, own_text, answer, check, tag)
    _send(comm, own_text, members[0], tag)
    with engine.lock:
        received, request = _receive(comm, members[0], tag)
    report = WaitReport(f"rank {comm.rank} of {comm.size}", deadline)

    def missing(_: Sequence[bool]) -> str:
        return f"no answer of rank {members[0]} for the group {name!r}"

    def look(done: Sequence[bool]) -> None:
        check()
        report.look(partial(missing, done))

    if not _wait([request], deadline, look)[0]:
        raise RendezvousError(report.timed_out(missing(())))
    text: bytes = received.tobytes().rstrip(b"\0")
    if text.startswith(_REFUSED):
        raise RendezvousError(text[1:].decode(errors="replace"))
    return text


def _collect(
    comm: Comm,
    members: Sequence[int],
    name: str,
    deadline: Deadline,
    own_text: bytes,
    answer: Callable[[Sequence[bytes]], bytes],
    check: Callable[[], None],
    tag: int,
) -> bytes:
    others = members[1:]
    with engine.lock:
        received = [_receive(comm, member, tag) for member in others]
    report = WaitReport(f"rank {comm.rank} of {comm.size}", deadline)

    def missing(done: Sequence[bool]) -> str:
        absent = [member for member, here in zip(others, done, strict=True) if not here]
        return f"{ranks_text(absent)} did not come to the group {name!r}"

    def look(done: Sequence[bool]) -> None:
        check()
        report.look(partial(missing, done))

    arrived = _wait([request for _, request in received], deadline, look)
    present = [member for member, here in zip(others, arrived, strict=True) if here]
    try:
        if not all(arrived):
            raise RendezvousError(report.timed_out(missing(arrived)))
        text = answer([own_text, *(data.tobytes().rstrip(b"\0") for data, _ in received)])
    except Exception as error:
        for member in present:
            _send(comm, _REFUSED + str(error).encode(), member, tag)
        raise
    for member in others:
        _send(comm, text, member, tag)
    return text


def _send(comm: Comm, text: bytes, peer: int, tag: int) -> None:
    data = np.frombuffer(text[:_MAX_BYTES], np.uint8)
    with engine.lock:
        request = comm.Isend(data, peer, tag)
        if not request.Test():
            keep((request, data))


def _receive(comm: Comm, peer: int, tag: int) -> tuple[Any, Request]:
    received = np.zeros(_MAX_BYTES, np.uint8)
    return received, comm.Irecv(received, peer, tag)


def _wait(
    requests: Sequence[Request], deadline: Deadline, look: Callable[[Sequence[bool]], None]
) -> list[bool]:
    """Wait until all requests have ended; at the deadline, or if `look` raises, cancel the rest."""
    # `look` is called with the state of each now and then. Other groups make progress meanwhile: a
    # member may have to finish a call there first.
    done = [False] * len(requests)
    try:
        _poll(requests, done, deadline, look)
    finally:
        with engine.lock:
            for place, request in enumerate(requests):
                if not done[place]:
                    request.Cancel()
                    status = MPI.Status()
                    request.Wait(status)
                    done[place] = not status.Is_cancelled()
    return done


def _poll(
    requests: Sequence[Request],
    done: list[bool],
    deadline: Deadline,
    look: Callable[[Sequence[bool]], None],
) -> None:
    """Set `done` for each request that has ended, until all have or the deadline has passed."""
    polls = 0
    while True:
        with engine.lock:
            for place, request in enumerate(requests):
                done[place] = done[place] or bool(request.Test())
        if all(done) or deadline.expired():
            return
        engine.advance()
        polls += 1
        if polls < YIELDS:
            os.sched_yield()
        else:
            look(done)
            _no_event.wait(POLL_SECONDS)  # MPI can't wake a thread


def meet(rank: int, size: int, deadline: Deadline) -> tuple[Store, int, int]:
    """Return a store that all of MPI's processes share, and rank and size as MPI has them.

    `rank` and `size` are the caller's expectations, negative if there are none. RendezvousError if
    they differ from MPI's, or if MPI made a single-process world though another launcher started
    more. The store's host is MASTER_ADDR if set, else the hostname of rank 0. Blocks until all
    ranks have arrived; RendezvousError names the ranks that have not by `deadline`.
    """
    require_threads()
    world = MPI.COMM_WORLD
    if (rank >= 0 and rank != world.rank) or (size > 0 and size != world.size):
        raise RendezvousError(
            f"MPI made this process rank {world.rank} of {world.size}, not rank {rank} of {size}: "
            "start it with mpirun, or give a store to use ranks of your own"
        )
    if world.size == 1:
        if size <= 0:  # the caller has not asked for a world of one
            _check_alone()
        return HashStore(), 0, 1
    timeout = min(deadline.remaining(), _MAX_TIMEOUT)
    hosted: list[TCPStore] = []

    def start(machines: Sequence[bytes]) -> bytes:
        """Start the store when all ranks have arrived; return its host and port as JSON."""
        alone = len(set(machines)) == 1
        host = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR") or socket.gethostname()
        hosted.append(TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout))
        return json.dumps([host, hosted[0].port]).encode()

    own_name = MPI.Get_processor_name().encode()
    answer = wait_for_members(world, range(world.size), "the store", deadline, own_name, start)
    host, port = json.loads(answer)
    return hosted[0] if hosted else TCPStore(host, port, timeout=timeout), world.rank, world.size


def _check_alone() -> None:
    """Refuse a single-process world if WORLD_SIZE, which other launchers set, is larger."""
    answer = os.environ.get("WORLD_SIZE", "1")
    if answer != "1":
        raise RendezvousError(
            f"WORLD_SIZE is {answer}, and MPI has this process alone: the mpi backend's ranks are "
            "started by MPI's mpirun, not by torchrun or nc10d.run (unset WORLD_SIZE for a world "
            "of one)"
        )
