"""Fault scenarios: floods of unauthenticated connections and of invalid frames."""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.forked_ranks import ForkedRanks, Report
from benchmarks.faults.results import HOST, LIMIT, Mailbox, Result, numbers
from benchmarks.libraries.c10d import C10dLibrary
from nc10d.errors import DistError

_OVER = 0
_AT_ONCE = 100
_STAY = 2.5
_LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def flooded(library: C10dLibrary, count: int) -> Result:
    """Flood a store with strangers, a hundred at a time, while an honest client makes calls."""
    with Mailbox() as mailbox:
        part = partial(_flood, library, count, mailbox)
        played = ForkedRanks(3).play(part, 2, 60.0 + 0.1 * count)
    took = [number for report in played.reports for number in report.get("took", ())]
    if len(played.reports) < 2 or not took:
        return Result((), f"{count} strangers: the honest client is not served")
    calls = statistics.quantiles(took, n=100)
    words = f"{1e3 * calls[98]:.1f} ms in 99 of 100, {len(took)} calls of an honest client"
    return Result((), f"{count} strangers: {words}")


def _flood(
    library: C10dLibrary, count: int, mailbox: Mailbox, ranks: ForkedRanks, rank: int
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
            with ExitStack() as stack:
                _turned_away(_visit([port], _AT_ONCE, chance, stack), _STAY)
        ranks.note(_OVER, 1.0)
        return {}
    return {"took": _honest(library, port, ranks)}


def _honest(library: C10dLibrary, port: int, ranks: ForkedRanks) -> list[float]:
    library.silence()
    store, took = library.reach(port, LIMIT, guarded=True), []
    store.add("n", 1)
    while not ranks.noted(_OVER):
        begun = time.monotonic()
        store.add("n", 1)
        took.append(time.monotonic() - begun)
    return took


def _visit(
    ports: Sequence[int], count: int, chance: random.Random, stack: ExitStack
) -> list[socket.socket]:
    """Connect and send garbage, huge lengths, partial words or nothing; return the sockets."""
    openings = (b"", b"\x00" * 7, b"\xff" * 64, chance.randbytes(300), b"GET / HTTP/1.1\r\n\r\n")
    wires = []
    for _ in range(count):
        with suppress(OSError):
            wire = socket.create_connection((HOST, chance.choice(ports)), 5.0)
            wires.append(stack.enter_context(wire))
            wire.sendall(chance.choice(openings))
    return wires


def _turned_away(wires: Sequence[socket.socket], patience: float) -> int:
    """Return how many connections the peer has closed; blocks for all, at most `patience`."""
    until, gone = time.monotonic() + patience, 0
    for wire in wires:
        wire.settimeout(max(0.001, until - time.monotonic()))
        try:
            gone += wire.recv(1000) == b""
        except TimeoutError:
            pass
        except OSError:
            gone += 1
    return gone


def at_ports(library: C10dLibrary, count: int) -> Result:
    """Connect to a rank's ports while it waits for its peer, and after the group is formed."""
    with Mailbox() as here, Mailbox() as go, Mailbox() as formed:
        part = partial(_near_port, library, next(numbers), count, (here, go, formed))
        reports = ForkedRanks(3).play(part, 3, 60.0 + 0.01 * count).reports
    words = {report["rank"]: report["words"] for report in reports}
    if {*words} != {0, 1, 2} or words[0] != words[1]:
        return Result((), f"{count} connections: the ranks don't meet")
    return Result((), f"{count} connections: {words[2]}; {words[0]}")


def _near_port(
    library: C10dLibrary,
    number: int,
    count: int,
    boxes: tuple[Mailbox, Mailbox, Mailbox],
    ranks: ForkedRanks,
    rank: int,
) -> Report:
    here, go, formed = boxes
    if rank == 2:
        return {"words": _pester(count, here, go, formed)}
    os.environ["NC10D_HOST_ID"] = str(rank)  # ranks of one host have no ports
    if rank == 0:
        here.put(os.getpid())
    else:
        sys.addaudithook(partial(_come_late, [go]))
    library.join(number, rank, 2, 60.0 + 0.01 * count)
    x = library.ones(1000)
    library.dist.all_reduce(x)
    if rank == 0:
        formed.put(1)
        formed.wait_answer()
    library.call(0, 1)
    library.leave()
    return {"words": "the sum is right" if float(x.sum()) == 2000 else "the sum is wrong"}


def _come_late(permits: list[Mailbox], event: str, details: tuple[Any, ...]) -> None:
    """Delay this rank's first port until the mailbox permits it: an audit hook."""
    if permits and event == "socket.bind" and isinstance(details[1], tuple):
        permits.pop().take()


def _pester(count: int, here: Mailbox, go: Mailbox, formed: Mailbox) -> str:
    """Connect again and again, admit the other rank, and count the connections that remain."""
    pid, chance = here.take(), random.Random(count)
    while not (ports := _ports(pid)):
        time.sleep(0.01)  # no event announces that a process listens
    for _ in range(0, count - _AT_ONCE, _AT_ONCE):
        with ExitStack() as stack:
            _visit(ports, _AT_ONCE, chance, stack)
    with ExitStack() as stack:
        stayed = _visit(ports, min(count, _AT_ONCE), chance, stack)
        go.put(1)
        formed.take()
        kept = len(stayed) - _turned_away(stayed, _STAY)
        after = _visit(ports, 10, chance, stack)
        formed.answer()
    return f"{kept or 'none'} kept, {len(after) or 'none'} let in afterwards"


def _ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(path))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    own = (row for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in sockets)
    return [int(row[1].rpartition(":")[2], 16) for row in own]


def mutated(library: C10dLibrary, count: int) -> Result:
    """Feed random and changed frames to the parsers of requests, handshakes and messages."""
    if library.name != "nc10d":
        return Result((), "its parser can't be called by itself")
    chance, each = random.Random(count), count // 4
    taken = _requests(each, chance) + _handshakes(each, chance) + _lines(each, chance)
    taken += forged_frames(each, chance)
    if taken:
        raise DistError(f"{taken} messages that are none were taken in")
    return Result((), f"{count} frames: no crash, nothing accepted")


def _requests(count: int, chance: random.Random) -> int:
    """Feed a store's parser; return 0, since any request that it accepts is legitimate."""
    from nc10d.store import wire as m

    good = m.with_u32(m.VALIDATE, m.MAGIC) + m.with_value(m.SET, b"/k", b"value")
    limits = m.Limits()
    for _ in range(count):
        with suppress(m.BadFrame):
            m.Parser(limits).feed(_changed(good, chance))
    return 0


def _handshakes(count: int, chance: random.Random) -> int:
    """Feed the answering side of handshakes; return how many it accepted without a proof."""
    from nc10d.auth.handshake import (
        BadHandshake,
        HandshakeAnswerer,
        HandshakeCaller,
        Introduction,
        group_digest,
    )

    key, caller = chance.randbytes(32), Introduction(1, 0, 0, group_digest("world"))
    hello, taken = HandshakeCaller(chance.randbytes(32), caller).hello, 0
    for _ in range(count):
        answerer = HandshakeAnswerer(key, caller.__eq__)
        sent = _changed(hello, chance) + chance.randbytes(32)
        with suppress(BadHandshake):
            while answerer.wants and sent:
                wants = answerer.wants
                answerer.feed(sent[:wants])
                sent = sent[wants:]
        taken += answerer.keys is not None
    return taken


def _lines(count: int, chance: random.Random) -> int:
    """Feed a control connection; return the number of invalid messages that it accepted."""
    from nc10d.backend.cpu.control.connections import ControlConnection, framed

    kinds, good, taken = ("leave", "value", "consensus"), framed({"kind": "leave", "group": "w"}), 0
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        for _ in range(count):
            far.sendall(_changed(good, chance))
            taken += sum(
                message["kind"] not in kinds for message in ControlConnection(1, near).receive()
            )
    return taken


def forged_frames(count: int, chance: random.Random) -> int:
    """Feed the opener of sealed frames; return how often it accepted a forged frame."""
    from nc10d.auth.handshake import BadSeal, Opener, Sealer

    key, taken = chance.randbytes(32), 0
    good = Sealer(key).seal(b"a request of the store")
    for _ in range(count):
        changed = _changed(good, chance)
        if changed.startswith(good):
            continue
        with suppress(BadSeal):
            taken += Opener(key).feed(changed) != b""
    return taken


def _changed(frame: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(frame))
    match chance.randrange(4):
        case 0:
            return frame[:at] + bytes((frame[at] ^ 1 << chance.randrange(8),)) + frame[at + 1 :]
        case 1:
            return frame[:at]
        case 2:
            return frame[:at] + chance.randbytes(8) + frame[at:]
        case _:
            return chance.randbytes(len(frame))
