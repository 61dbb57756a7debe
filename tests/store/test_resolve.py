"""A host name that is not known is an error within seconds; a variable waits for it longer."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from nc10d.auth.token import reachable
from nc10d.base import resolve as module
from nc10d.base.resolve import dns_seconds, resolve
from nc10d.errors import StoreTimeout
from nc10d.store import TCPStore

BRIEF = 0.2
real = socket.getaddrinfo


def test_addresses_in_numbers_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", None)
    assert [found[4][0] for found in resolve("127.0.0.1", 1)] == ["127.0.0.1"]
    assert resolve("::1", 1)[0][4][:2] == ("::1", 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "nöwhere.invalid"])
def test_what_a_handler_raises_meets_no_codec_in_python(host: str) -> None:
    # Python's codecs raise a copy of an error that comes amid them.
    def enter(frame: FrameType, event: str, argument: object) -> None:
        codecs.append(frame.f_code.co_filename.endswith("encodings/idna.py"))

    codecs: list[bool] = []
    sys.setprofile(enter)
    try:
        with contextlib.suppress(socket.gaierror):
            resolve(host, 7)
    finally:
        sys.setprofile(None)
    assert codecs
    assert not any(codecs)


def test_a_name_is_asked_for() -> None:
    assert resolve("localhost", 7)[0][4][1] == 7
    for name in ("nowhere.invalid", "x" * 64):
        with pytest.raises(socket.gaierror):
            resolve(name, 7)


def test_silent_name_servers_are_not_waited_for_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def silent(host: str, *arguments: Any, flags: int = 0, **others: Any) -> Any:
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        over.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    monkeypatch.setattr(module, "DEFAULT_SECONDS", BRIEF)
    begun = time.monotonic()
    with pytest.raises(socket.gaierror, match="name servers do not answer"):
        resolve("slow.example", 7, BRIEF)
    with pytest.raises(StoreTimeout, match=r"name servers do not answer"):
        TCPStore("slow.example", 7, timeout=BRIEF)
    assert time.monotonic() - begun < 10
    over.set()


def test_an_unknown_name_is_an_error_long_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NC10D_DNS_TIMEOUT", str(BRIEF))
    begun = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"name is not known here.*NC10D_DNS_TIMEOUT"):
        TCPStore("nowhere.invalid", 7, timeout=300)
    assert BRIEF <= time.monotonic() - begun < 20


def test_a_name_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known_at = time.monotonic() + BRIEF

    def late(host: str, *arguments: Any, **others: Any) -> Any:
        if host == "late.example" and (others.get("flags") or time.monotonic() < known_at):
            raise socket.gaierror(socket.EAI_NONAME, "not yet")
        return real("127.0.0.1" if host == "late.example" else host, *arguments, **others)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    with (
        contextlib.closing(TCPStore("127.0.0.1", is_master=True)) as store,
        contextlib.closing(TCPStore("late.example", store.port, timeout=20)) as client,
    ):
        client.set("k", "v")
        assert store.get("k") == b"v"


def test_the_variable_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dns_seconds() == 5.0
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("NC10D_DNS_TIMEOUT", text)
        with pytest.raises(ValueError, match="NC10D_DNS_TIMEOUT is a number of seconds"):
            dns_seconds()


def test_an_unknown_name_is_not_reachable() -> None:
    assert not reachable("nowhere.invalid")
    assert not reachable("localhost")
