"""Scenarios of faults: stores that do not answer."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.faults.cells import HOST, LIMIT, TIMEOUT, Cell, Mailbox, counted, told
from benchmarks.faults.libraries import Library
from benchmarks.faults.stage import Report, Stage
from nc10d.store import wire as m

_KILLED = 0
_HALF = m.STOP_WAITING + m.string(b"value")[:-3]
_HELLO = 10
"""Bytes of what every client says first: VALIDATE, and PING with four bytes that come back."""


Server = Callable[[Library, Mailbox, Stage], None]


def unanswered(library: Library, count: int) -> Cell:
    """Ask stores that are absent, mute, frozen, dead, and that answer half; all at once."""
    late, kinds = [], []
    for _ in range(count):
        with ExitStack() as stack:
            hows = (absent, mute, frozen, dead, half)
            servers = [(how, stack.enter_context(Mailbox())) for how in hows]
            stage = Stage(2 * len(servers))
            played = stage.play(partial(_meet, library, servers), len(servers), LIMIT)
        for report in played.reports:
            died = report["how"] == dead.__name__
            due = stage.noted(_KILLED) if died else report["at"] + TIMEOUT
            late.append(report["end"] - due)
        kinds += [report["kind"] for report in played.reports]
        kinds += ["hung"] * (len(servers) - len(played.reports))
    return Cell(tuple(late), counted(kinds))


def _meet(
    library: Library, servers: Sequence[tuple[Server, Mailbox]], stage: Stage, rank: int
) -> Report | None:
    """Let even ranks be servers, and the one after each of them its client."""
    how, mailbox = servers[rank // 2]
    if rank % 2:
        return {"how": how.__name__, **_ask(library, mailbox, LIMIT if how is dead else TIMEOUT)}
    how(library, mailbox, stage)
    signal.pause()
    return None


def _ask(library: Library, mailbox: Mailbox, timeout: float) -> Report:
    """Ask a store for a key; who waits for a death has the time for it, however late that is."""
    port, begun = mailbox.take(), time.monotonic()

    def ask() -> None:
        client = library.reach(port, timeout)
        mailbox.answer()
        client.get("a key")

    report = told(library, ask, begun)
    return {"at": begun, "end": time.monotonic(), "kind": report["kind"]}


def absent(library: Library, mailbox: Mailbox, stage: Stage) -> None:
    """Tell a port at which nobody listens."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    mailbox.put(port)


def mute(library: Library, mailbox: Mailbox, stage: Stage) -> None:
    """Take connections and never say a word."""
    with socket.create_server((HOST, 0)) as listener:
        mailbox.put(listener.getsockname()[1])
        signal.pause()


def frozen(library: Library, mailbox: Mailbox, stage: Stage) -> None:
    """Serve, and stop at once."""
    server, port = library.serve()
    mailbox.put(port)
    os.kill(os.getpid(), signal.SIGSTOP)
    del server


def dead(library: Library, mailbox: Mailbox, stage: Stage) -> None:
    """Serve, and die while somebody waits."""
    server, port = library.serve()
    mailbox.put(port)
    mailbox.wait_answer()
    threading.Timer(0.4, _die, (stage,)).start()
    signal.pause()
    del server


def _die(stage: Stage) -> None:
    stage.note(_KILLED, time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def half(library: Library, mailbox: Mailbox, stage: Stage) -> None:
    """Greet as a server does, and answer the first question by half of what it asks for."""
    with socket.create_server((HOST, 0)) as listener:
        mailbox.put(listener.getsockname()[1])
        wire, _ = listener.accept()
        with wire:
            hello = b""
            while len(hello) < _HELLO:
                hello += wire.recv(100)
            more = hello[_HELLO:]  # nc10d's clients ask one thing more than torch's
            wire.sendall(hello[_HELLO - 4 : _HELLO] + (m.READY if more else b""))
            wire.recv(1000)
            wire.sendall(_HALF)
            signal.pause()
