"""TCPStore as a client of torch's own servers: the libuv server and the older server.

Writes have no reply, and order is kept only within a connection. After a write, the client that
wrote reads first, and only then another client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from nc10d.store import TCPStore
from nc10d.testing import check_store


@pytest.fixture(params=["libuv", "legacy"])
def torch_server(request: pytest.FixtureRequest) -> Iterator[tuple[object, TCPStore]]:
    dist = pytest.importorskip("torch.distributed")
    libuv = request.param == "libuv"
    theirs = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=libuv)
    with contextlib.closing(TCPStore("127.0.0.1", theirs.port, timeout=20)) as ours:
        yield theirs, ours


class WithoutQueues(TCPStore):
    """A client of torch's older server, which closes the connection at a call of a queue."""

    def queue_push(self, key: str, value: object) -> None:
        """Leave out the laws of queues."""
        raise NotImplementedError


def test_nc10ds_client_obeys_the_laws_of_stores_on_torchs_server(torch_server):
    theirs, _ = torch_server
    client, laws = (TCPStore, 14) if theirs.libuvBackend else (WithoutQueues, 13)
    assert check_store(lambda: client("127.0.0.1", theirs.port, timeout=20)) == laws


def test_nc10ds_client_and_torchs_see_the_same_values_on_torchs_server(torch_server):
    theirs, ours = torch_server
    theirs.set("k", "from torch")
    assert ours.get("k") == b"from torch"
    ours.set("k", b"from us")
    assert ours.get("k") == theirs.get("k") == b"from us"
    assert ours.add("n", 2) == 2
    assert theirs.add("n", 3) == 5
    assert sorted(ours.list_keys()) == ["k", "n"]
    assert ours.num_keys() == theirs.num_keys()
