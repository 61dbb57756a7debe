"""TCPStore as a client of torch's own servers: the libuv server and the older server.

Writes have no reply, and order is kept only within a connection. After a write, the client that
wrote reads first, and only then another client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nc10d.errors import StoreTimeout
from nc10d.store import TCPStore


@pytest.fixture(params=["libuv", "legacy"])
def torch_server(request: pytest.FixtureRequest) -> Iterator[tuple[object, TCPStore]]:
    dist = pytest.importorskip("torch.distributed")
    libuv = request.param == "libuv"
    theirs = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=libuv)
    with contextlib.closing(TCPStore("127.0.0.1", theirs.port, timeout=20)) as ours:
        yield theirs, ours


def test_nc10ds_client_and_torchs_see_the_same_values_on_torchs_server(torch_server):
    theirs, ours = torch_server
    theirs.set("k", "from torch")
    assert ours.get("k") == b"from torch"
    ours.set("k", b"from us")
    assert ours.get("k") == theirs.get("k") == b"from us"
    assert ours.add("n", 2) == 2
    assert theirs.add("n", 3) == 5
    ours.multi_set(["a", "b"], ["1", "2"])
    assert ours.multi_get(["a", "b"]) == theirs.multi_get(["a", "b"]) == [b"1", b"2"]
    ours.append("a", "+")
    assert ours.get("a") == theirs.get("a") == b"1+"
    assert ours.compare_set("a", "1+", "3") == b"3"
    assert ours.check(["a", "b"])
    assert not ours.check(["absent"])
    assert ours.num_keys() == theirs.num_keys()
    assert sorted(ours.list_keys()) == ["a", "b", "k", "n"]
    assert ours.delete_key("a")
    assert not ours.delete_key("a")
    ours.barrier("b1", 1)


def test_nc10ds_client_waits_and_times_out_on_torchs_server(torch_server):
    theirs, ours = torch_server
    with pytest.raises(StoreTimeout, match="absent"):
        ours.wait(["absent"], 0.1)
    twin = ours.clone()
    with ThreadPoolExecutor(1) as pool, contextlib.closing(twin):
        waiting = pool.submit(twin.get, "late")
        theirs.set("late", "now")
        assert waiting.result(20) == b"now"


def test_queues_work_on_torchs_server():
    dist = pytest.importorskip("torch.distributed")
    theirs = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with contextlib.closing(TCPStore("127.0.0.1", theirs.port, timeout=20)) as ours:
        theirs.queue_push("q", "1")
        assert theirs.queue_len("q") == 1
        ours.queue_push("q", "2")
        assert ours.queue_len("q") == 2
        assert ours.queue_pop("q") == b"1"
        assert theirs.queue_pop("q") == b"2"
