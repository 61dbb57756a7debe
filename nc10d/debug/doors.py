"""Scenarios of faults: stores that do not answer, and strangers at the doors."""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from nc10d.debug.cells import LIMIT, TIMEOUT, Cell, counted, told
from nc10d.debug.libraries import Library
from nc10d.debug.stage import Report, Stage
from nc10d.errors import DistError

HOST = "127.0.0.1"
_KILLED = 0
_AT_ONCE = 100
_STAY = 2.5


def unanswered(library: Library, count: int) -> Cell:
    """Ask stores that are absent, mute, frozen and dead."""
    late, kinds = [], []
    for how in (absent, mute, frozen, dead):
        for _ in range(count):
            with _Mailbox() as mailbox:
                stage = Stage(2)
                played = stage.play(partial(_ask, library, how, mailbox), 1, LIMIT)
            for report in played.reports:
                due = stage.noted(_KILLED) if how is dead else report["at"] + TIMEOUT
                late.append(report["end"] - due)
            kinds += [report["kind"] for report in played.reports] or ["hung"]
    return Cell(tuple(late), counted(kinds))


class _Mailbox:
    """A line by which a server tells its port, and a client that it has connected."""

    def __enter__(self) -> _Mailbox:
        self._server, self._client = socket.socketpair()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()
        self._client.close()

    def put(self, port: int) -> None:
        """Tell a port, to one who takes it."""
        self._server.sendall(b"%8d" % port)

    def take(self) -> int:
        """Return the port; blocks until it is told."""
        return int(self._client.recv(8))

    def say_connected(self) -> None:
        """Tell the server that a client is there."""
        self._client.sendall(b"!")

    def wait_connected(self) -> None:
        """Block until a client is there."""
        self._server.recv(1)


Server = Callable[[Library, _Mailbox, Stage], None]


def _ask(
    library: Library, how: Server, mailbox: _Mailbox, stage: Stage, rank: int
) -> Report | None:
    if rank == 0:
        how(library, mailbox, stage)
        signal.pause()
        return None
    port, begun = mailbox.take(), time.monotonic()
    # Who waits for a death has the time for it, however late the server gets to die.
    timeout = LIMIT if how is dead else TIMEOUT

    def ask() -> None:
        client = library.reach(port, timeout)
        mailbox.say_connected()
        client.get("a key")

    report = told(library, ask, begun)
    return {"at": begun, "end": time.monotonic(), "kind": report["kind"]}


def absent(library: Library, mailbox: _Mailbox, stage: Stage) -> None:
    """Tell a port at which nobody listens."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    mailbox.put(port)


def mute(library: Library, mailbox: _Mailbox, stage: Stage) -> None:
    """Take connections and never say a word."""
    with socket.create_server((HOST, 0)) as listener:
        mailbox.put(listener.getsockname()[1])
        signal.pause()


def frozen(library: Library, mailbox: _Mailbox, stage: Stage) -> None:
    """Serve, and stop at once."""
    server, port = library.serve()
    mailbox.put(port)
    os.kill(os.getpid(), signal.SIGSTOP)
    del server


def dead(library: Library, mailbox: _Mailbox, stage: Stage) -> None:
    """Serve, and die while somebody waits."""
    server, port = library.serve()
    mailbox.put(port)
    mailbox.wait_connected()
    threading.Timer(0.4, _die, (stage,)).start()
    signal.pause()
    del server


def _die(stage: Stage) -> None:
    stage.note(_KILLED, time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def flooded(library: Library, count: int) -> Cell:
    """Let strangers come to a store, a hundred at a time, while an honest client asks on and on."""
    with _Mailbox() as mailbox:
        part = partial(_flood, library, count, mailbox)
        played = Stage(3).play(part, 2, 60.0 + 0.1 * count)
    took = [number for report in played.reports for number in report.get("took", ())]
    if len(played.reports) < 2 or not took:
        return Cell((), f"{count} strangers: the honest client is not served")
    calls = statistics.quantiles(took, n=100)
    words = f"{1e3 * calls[98]:.1f} ms in 99 of 100, {len(took)} calls of an honest client"
    return Cell((), f"{count} strangers: {words}")


def _flood(
    library: Library, count: int, mailbox: _Mailbox, stage: Stage, rank: int
) -> Report | None:
    if rank == 0:
        server, port = library.serve(guarded=True)
        mailbox.put(port)
        mailbox.put(port)
        signal.pause()
        del server
        return None
    port = mailbox.take()
    if rank == 1:
        chance = random.Random(count)
        for _ in range(0, count, _AT_ONCE):
            _visit(port, chance)
        stage.note(_KILLED, 1.0)
        return {}
    return {"took": _honest(library, port, stage)}


def _honest(library: Library, port: int, stage: Stage) -> list[float]:
    store, took = library.reach(port, LIMIT, guarded=True), []
    store.add("n", 1)
    while not stage.noted(_KILLED):
        begun = time.monotonic()
        store.add("n", 1)
        took.append(time.monotonic() - begun)
    return took


def _visit(port: int, chance: random.Random) -> None:
    """Come with garbage, huge lengths, half words and silence; stay until all are turned away."""
    said = (b"", b"\x00" * 7, b"\xff" * 64, chance.randbytes(300), b"GET / HTTP/1.1\r\n\r\n")
    wires: list[socket.socket] = []
    with ExitStack() as stack:
        for _ in range(_AT_ONCE):
            with suppress(OSError):
                wire = stack.enter_context(socket.create_connection((HOST, port), 5.0))
                wires.append(wire)
                wire.sendall(chance.choice(said))
        until = time.monotonic() + _STAY
        for wire in wires:
            wire.settimeout(max(0.001, until - time.monotonic()))
            with suppress(OSError):
                wire.recv(1000)


def mutated(library: Library, count: int) -> Cell:
    """Feed random and changed frames to what reads a store's requests and the control lines."""
    if library.name != "nc10d":
        return Cell((), "its parser can't be called by itself")
    from nc10d.backend.cpu.control import Line
    from nc10d.store import messages as m

    chance, accepted = random.Random(count), 0
    good = m.with_u32(m.VALIDATE, m.MAGIC) + m.with_value(m.SET, b"/k", b"value")
    for _ in range(count // 2):
        parser = m.Parser(m.Limits())
        with suppress(m.BadFrame):
            parser.feed(_changed(good, chance))
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            line = Line(1, one)
            other.sendall(_changed(b'\x1f\0\0\0{"kind": "left", "group": "w"}', chance))
            accepted += sum(message["kind"] not in _KINDS for message in line.receive())
    if accepted:
        raise DistError(f"{accepted} messages that are none were taken in")
    return Cell((), f"{count} frames: no crash, nothing accepted")


_KINDS = ("left", "part", "say")


def _changed(frame: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(frame))
    return chance.choice(
        (
            frame[:at] + bytes((frame[at] ^ 1 << chance.randrange(8),)) + frame[at + 1 :],
            frame[:at],
            frame[:at] + chance.randbytes(8) + frame[at:],
            chance.randbytes(len(frame)),
        )
    )
