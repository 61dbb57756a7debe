"""Fault scenarios: stores that do not answer."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.faults.forked_ranks import ForkedRanks, Report
from benchmarks.faults.results import HOST, LIMIT, TIMEOUT, Mailbox, Result, counted, outcome_of
from benchmarks.libraries.c10d import C10dLibrary
from nc10d.store import wire as m

_KILLED = 0
_PARTIAL = m.STOP_WAITING + m.string(b"value")[:-3]
_HELLO = 10
"""Bytes of every client's first request: VALIDATE, and PING with four bytes to be echoed."""


Server = Callable[[C10dLibrary, Mailbox, ForkedRanks], None]


def unanswered(library: C10dLibrary, count: int) -> Result:
    """Ask stores that are absent, mute, frozen, dead, or send half an answer; all at once."""
    late, kinds = [], []
    for _ in range(count):
        with ExitStack() as stack:
            hows = (absent, mute, frozen, dead, partial_answer)
            servers = [(how, stack.enter_context(Mailbox())) for how in hows]
            ranks = ForkedRanks(2 * len(servers))
            played = ranks.play(partial(_meet, library, servers), len(servers), LIMIT)
        for report in played.reports:
            died = report["how"] == dead.__name__
            due = ranks.noted(_KILLED) if died else report["at"] + TIMEOUT
            late.append(report["end"] - due)
        kinds += [report["kind"] for report in played.reports]
        kinds += ["hung"] * (len(servers) - len(played.reports))
    return Result(tuple(late), counted(kinds))


def _meet(
    library: C10dLibrary, servers: Sequence[tuple[Server, Mailbox]], ranks: ForkedRanks, rank: int
) -> Report | None:
    """Play a server on even ranks, and its client on the next rank."""
    how, mailbox = servers[rank // 2]
    if rank % 2:
        return {"how": how.__name__, **_ask(library, mailbox, LIMIT if how is dead else TIMEOUT)}
    how(library, mailbox, ranks)
    signal.pause()
    return None


def _ask(library: C10dLibrary, mailbox: Mailbox, timeout: float) -> Report:
    """Ask a store for a key; the client of a dying store gets a longer timeout."""
    port, begun = mailbox.take(), time.monotonic()
    library.silence()  # torch reports missing answers on the terminal

    def ask() -> None:
        client = library.reach(port, timeout)
        mailbox.answer()
        client.get("a key")

    report = outcome_of(library, ask, begun)
    return {"at": begun, "end": time.monotonic(), "kind": report["kind"]}


def absent(library: C10dLibrary, mailbox: Mailbox, ranks: ForkedRanks) -> None:
    """Name a port without a listener."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    mailbox.put(port)


def mute(library: C10dLibrary, mailbox: Mailbox, ranks: ForkedRanks) -> None:
    """Accept connections and never answer."""
    with socket.create_server((HOST, 0)) as listener:
        mailbox.put(listener.getsockname()[1])
        signal.pause()


def frozen(library: C10dLibrary, mailbox: Mailbox, ranks: ForkedRanks) -> None:
    """Serve, and be stopped at once."""
    server, port = library.serve()
    mailbox.put(port)
    os.kill(os.getpid(), signal.SIGSTOP)
    del server


def dead(library: C10dLibrary, mailbox: Mailbox, ranks: ForkedRanks) -> None:
    """Serve, and die while a client waits."""
    server, port = library.serve()
    mailbox.put(port)
    mailbox.wait_answer()
    threading.Timer(0.4, _die, (ranks,)).start()
    signal.pause()
    del server


def _die(ranks: ForkedRanks) -> None:
    ranks.note(_KILLED, time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def partial_answer(library: C10dLibrary, mailbox: Mailbox, ranks: ForkedRanks) -> None:
    """Accept a client as a server does, and send half of the first answer."""
    with socket.create_server((HOST, 0)) as listener:
        mailbox.put(listener.getsockname()[1])
        wire, _ = listener.accept()
        with wire:
            hello = b""
            while len(hello) < _HELLO:
                hello += wire.recv(100)
            more = hello[_HELLO:]  # nc10d's clients send a further request
            wire.sendall(hello[_HELLO - 4 : _HELLO] + (m.READY if more else b""))
            wire.recv(1000)
            wire.sendall(_PARTIAL)
            signal.pause()
