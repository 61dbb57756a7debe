"""The user of a connection, and a store that serves its own user without a token."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest

from nc10d.errors import StoreError
from nc10d.store import TCPStore, peer_user
from nc10d.store.peer_user import peer_uid
from nc10d.store.wire import NEEDS_TOKEN, REFUSAL

V4, V6 = socket.AF_INET, socket.AF_INET6
NOBODY = 65534
CONNECTIONS = [
    (V4, "127.0.0.1", V4, "127.0.0.1"),
    (V4, "127.0.0.1", V6, "::ffff:127.0.0.1"),
    (V6, "::", V4, "127.0.0.1"),
    (V6, "::1", V6, "::1"),
]
TOKEN = bytes(range(32))
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
# A request: VALIDATE, then SET "/a" to "evil". The connection is closed at once, or kept open.
STRANGER = """
import encodings.idna, os, socket, struct, sys  # before the interpreter's files are out of reach
os.setuid(int(sys.argv[3]))
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5)
text = lambda x: struct.pack("<Q", len(x)) + x
sock.sendall(struct.pack("<BI", 0, 0x3C85F7CE) + b"\\x01" + text(b"/a") + text(b"evil"))
if sys.argv[2] == "waits":
    print(sock.recv(100))
"""


@pytest.fixture(params=["netlink", "proc"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the kernel in each of the two ways."""
    if request.param == "proc":
        monkeypatch.setattr(peer_user, "_by_netlink", _no_netlink)


def _no_netlink(_: object) -> int | None:
    raise OSError


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("family", "where", "client_family", "to"), CONNECTIONS)
def test_the_kernel_knows_the_user_of_a_connection(
    family: int, where: str, client_family: int, to: str
) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        listener.bind((where, 0))
        listener.listen()
        client = stack.enter_context(socket.socket(client_family))
        client.connect((to, listener.getsockname()[1]))
        accepted = stack.enter_context(listener.accept()[0])
        assert peer_uid(accepted) == os.geteuid()
        client.close()
        assert peer_uid(accepted) is None, "a closed socket has no user; the kernel says root"


def test_the_user_of_a_unix_socket_is_known() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_uid(ours) == os.geteuid()


def test_a_store_serves_its_own_user_without_a_token() -> None:
    torch = pytest.importorskip("torch.distributed")
    with closing(TCPStore("127.0.0.1", is_master=True, token=TOKEN, same_user=True)) as store:
        store.set("a", "from a client with the token")
        plain = torch.TCPStore(
            "127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20)
        )
        assert plain.get("a") == b"from a client with the token"
        with closing(TCPStore("127.0.0.1", store.port, timeout=20, token=None)) as ours:
            ours.set("b", "from a client without")
        assert store.get("b") == b"from a client without"
        with pytest.raises(StoreError):
            TCPStore("127.0.0.1", store.port, timeout=0.1, token=bytes(32))


def test_without_same_user_the_token_is_needed() -> None:
    store = TCPStore("127.0.0.1", is_master=True, token=TOKEN)
    with closing(store), pytest.raises(StoreError):
        TCPStore("127.0.0.1", store.port, timeout=0.3, token=None)


@as_root
@pytest.mark.parametrize("how", ["waits", "leaves"])
def test_another_user_is_not_served(how: str) -> None:
    with closing(TCPStore("127.0.0.1", is_master=True, token=TOKEN, same_user=True)) as store:
        command = [sys.executable, "-I", "-S", "-c", STRANGER, str(store.port), how, str(NOBODY)]
        for _ in range(10):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.stderr == "" or "ConnectionReset" in done.stderr
            assert done.stdout.strip() in ("", "b''", str(REFUSAL + NEEDS_TOKEN))
        assert not store.check(["a"])
