"""Control connections: messages arrive whole, and the end of a connection is reported once."""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.backend.cpu.control.connections import ControlConnection, ControlConnections, framed
from nc10d.backend.cpu.control.silence import LOOKS, SilenceWatch, peer_seconds

Pair = tuple[socket.socket, socket.socket]


def pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setblocking(False)
    return near, far


@pytest.fixture
def ends() -> Iterator[Pair]:
    near, far = pair()
    with near, far:
        yield near, far


LAST = {"kind": "leave", "group": "world"}
TEXTS = {"group": st.text(), "value": st.text()}
MESSAGES = st.one_of(
    st.fixed_dictionaries({"kind": st.just("leave"), "group": st.text()}),
    st.fixed_dictionaries({"kind": st.just("value"), "key": st.text(), **TEXTS}),
    st.fixed_dictionaries(
        {"kind": st.just("consensus"), "topic": st.text(), "step": st.integers(), **TEXTS}
    ),
)
JSON = st.none() | st.booleans() | st.integers() | st.text() | st.dictionaries(st.text(), st.text())
FIELDS = st.sampled_from(["kind", "group"])


@settings(max_examples=25, deadline=None)
@given(messages=st.lists(MESSAGES), cuts=st.lists(st.integers(1, 40), min_size=1))
def test_messages_arrive_whole_however_they_are_cut(
    messages: list[dict[str, object]], cuts: list[int]
) -> None:
    near, far = pair()
    with near, far:
        connection, raw, got = ControlConnection(1, near), b"".join(map(framed, messages)), []
        turn = 0
        while raw:
            cut = cuts[turn % len(cuts)]
            far.sendall(raw[:cut])
            raw, turn = raw[cut:], turn + 1
            select.select([near], [], [], 5.0)
            got += connection.receive()
        assert got == messages
        assert connection.ended is None


@pytest.mark.parametrize("end", [b"", b"\xff" * 64], ids=["closed", "broken"])
def test_a_connection_that_has_ended_keeps_no_messages(ends: Pair, end: bytes) -> None:
    near, far = ends
    connection, data = ControlConnection(1, near), framed(LAST) * 1000
    while connection.send(data):
        pass
    assert connection.backlogged()
    far.sendall(end)
    far.shutdown(socket.SHUT_WR)
    while connection.ended is None:
        select.select([near], [], [], 5.0)
        connection.receive()
    assert not connection.backlogged()
    assert connection.send(data), "no flush is needed"
    assert not connection.backlogged()


def test_messages_that_do_not_fit_are_sent_later(ends: Pair) -> None:
    near, far = ends
    connection = ControlConnection(1, near)
    for number in range(2000):
        connection.send(framed({**LAST, "number": number, "text": "x" * 4000}))
    far.setblocking(False)
    peer = ControlConnection(0, far)
    got = []
    while len(got) < 2000 and peer.ended is None:
        select.select([far], [], [], 5.0)
        got += peer.receive()
        connection.flush()
    assert [message["number"] for message in got] == list(range(2000))


def test_the_end_of_a_connection_is_reported_once_after_its_last_message(ends: Pair) -> None:
    near, far = ends
    heard: list[object] = []
    control = ControlConnections(
        {7: near},
        lambda number, message: heard.append((number, message)),
        lambda number, reason: heard.append((number, reason)),
    )
    poller = select.poll()
    control.register(poller)
    far.sendall(framed(LAST))
    far.close()
    while len(heard) < 2:
        for fd, _ in poller.poll(5000):
            assert control.ready(fd, poller)
    assert heard == [(7, LAST), (7, "its connection was closed")]
    assert control.lost(7) == "its connection was closed"
    assert not poller.poll(0)
    control.send([7], {"to": "nobody"})


def test_a_peer_that_breaks_the_protocol_is_cut_off(ends: Pair) -> None:
    near, far = ends
    connection = ControlConnection(1, near)
    far.sendall(b"GET / HTTP/1.1\r\n\r\n")
    select.select([near], [], [], 5.0)
    assert connection.receive() == []
    assert connection.ended == "it does not keep to the protocol"


@settings(max_examples=300, deadline=None)
@given(
    body=st.binary(max_size=60)
    | st.builds(lambda x: json.dumps(x).encode(), st.recursive(JSON, st.lists, max_leaves=5))
    | st.builds(lambda m, drop: json.dumps({**m, drop: []}).encode(), MESSAGES, FIELDS)
)
def test_a_body_that_is_no_message_ends_the_connection_and_nothing_else(body: bytes) -> None:
    near, far = pair()
    with near, far:
        connection = ControlConnection(1, near)
        far.sendall(struct.pack("<I", len(body)) + body)
        select.select([near], [], [], 5.0)
        assert connection.receive() == []
        assert connection.ended == "it does not keep to the protocol"


def test_any_segment_ends_a_silence(ends: Pair) -> None:
    near, far = ends
    watch = SilenceWatch(near, 10.0)
    for _ in range(2):
        far.sendall(b"x")
        select.select([near], [], [], 5.0)
        near.recv(1)
        assert not watch.look()
        assert next(looks for looks in itertools.count(1) if watch.look()) >= LOOKS


def test_a_silent_rank_is_lost_and_told_of_it(ends: Pair) -> None:
    near, far = ends
    heard: list[object] = []
    control = ControlConnections(
        {7: near},
        lambda number, message: heard.append((number, message)),
        lambda number, reason: heard.append((number, reason)),
        seconds=0.01,
    )
    poller = select.poll()
    control.register(poller)
    while not heard:
        left = control.look()
        assert left is not None
        for fd, _ in poller.poll(1000 * left):
            assert control.ready(fd, poller)
    assert heard == [(7, "no answer for 0.01 s")]
    far.settimeout(5.0)
    with contextlib.suppress(ConnectionResetError):
        assert far.recv(1) == b""
    control.send([7], LAST)
    control.close()


def test_ranks_of_a_host_are_never_silent() -> None:
    near, far = socket.socketpair()
    with near, far:
        control = ControlConnections({7: near}, lambda *_: None, lambda *_: None, seconds=0.0)
        assert control.look() is None
        assert control.lost(7) is None


def test_the_longest_silence_is_seconds_that_loss_alone_does_not_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NC10D_PEER_TIMEOUT", raising=False)
    assert peer_seconds() == 10.0
    monkeypatch.setenv("NC10D_PEER_TIMEOUT", "3")
    assert peer_seconds() == 3.0
    for text in ("2.9", "-1", "nan", "inf", "soon"):
        monkeypatch.setenv("NC10D_PEER_TIMEOUT", text)
        with pytest.raises(ValueError, match=f"NC10D_PEER_TIMEOUT is a number .*{text}"):
            peer_seconds()
