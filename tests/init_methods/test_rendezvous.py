"""Ranks rendezvous by environment, address or file, also repeatedly; errors name missing ranks."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import ports
import pytest

import nc10d as dist
from nc10d.errors import RendezvousError
from nc10d.init_methods.methods import rendezvous
from nc10d.store import HashStore, Store, TCPStore

HOST = "127.0.0.1"
Met = tuple[Store, int, int]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = ("MASTER_", "TORCHELASTIC_", "NC10D_", "SLURM_", "OMPI_", "PMI_", "PMIX_")
    for name in [*os.environ]:
        if name.startswith(prefixes) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def port() -> int:
    return ports.free_port()


@contextlib.contextmanager
def met(size: int, method: str) -> Iterator[list[Met]]:
    """Let `size` ranks, as threads, find each other by `method`."""
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: rendezvous(method, rank, size, 20), range(size)))
    try:
        yield found
    finally:
        for store, _, _ in found:
            store.close()


def method_of(kind: str, port: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if kind == "env":
        monkeypatch.setenv("MASTER_ADDR", HOST)
        monkeypatch.setenv("MASTER_PORT", str(port))
        return "env://"
    return f"tcp://{HOST}:{port}" if kind == "tcp" else f"file://{path / 'meet'}"


@pytest.mark.parametrize("kind", ["env", "tcp", "file"])
def test_all_ranks_get_the_same_store(
    kind: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with met(3, method_of(kind, port, tmp_path, monkeypatch)) as found:
        assert [(rank, size) for _, rank, size in found] == [(0, 3), (1, 3), (2, 3)]
        found[2][0].set("k", "v")
        assert [store.get("k") for store, _, _ in found] == [b"v"] * 3


@pytest.mark.parametrize("kind", ["env", "tcp", "file"])
def test_a_second_rendezvous_does_not_see_keys_of_the_first(
    kind: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_of(kind, port, tmp_path, monkeypatch)
    with met(2, method) as first:
        first[0][0].set("k", "old")
        with met(2, method) as second:
            assert not any(store.check(["k"]) for store, _, _ in second)
            second[1][0].set("k", "new")
            assert first[1][0].get("k") == b"old"


def test_a_restarted_job_does_not_see_the_previous_jobs_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(TCPStore(HOST, is_master=True, timeout=20)) as agent:
        monkeypatch.setenv("MASTER_ADDR", HOST)
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        prefixes = []
        for restart in range(2):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
            with met(2, "env://") as found:
                assert not found[1][0].check(["k"])
                found[0][0].set("k", "v")
                prefixes += [key for key in agent.list_keys() if key.endswith("/k")]
        assert len({prefix.split("/")[1] for prefix in prefixes}) == 2


def test_rank_and_size_may_stand_in_the_environment_or_the_address(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rank, size = rendezvous(f"tcp://{HOST}:{port}?rank=0&world_size=1", timeout=20)
    store.close()
    assert (rank, size) == (0, 1)
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    store, rank, size = rendezvous("env://", -1, None, 20)
    store.close()
    assert (rank, size) == (0, 1)


def test_missing_ranks_are_named(port: int) -> None:
    told = (
        r"rank 0 of 3 timed out after 3 s at .*test_rendezvous\.py:\d+: "
        r"1 of 3 ranks came to TCPStore\(.*\); missing: 1, 2"
    )
    with pytest.raises(RendezvousError, match=told):
        rendezvous(f"tcp://{HOST}:{port}", 0, 3, 3.0)


def test_a_rank_that_arrives_twice_is_an_error(tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'meet'}"
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(rendezvous, method, 0, 2, 0.5) for _ in range(2)]
        assert all(isinstance(call.exception(20), RendezvousError) for call in calls)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_that_disagree_on_the_world_size_are_all_named(
    kind: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_of(kind, port, tmp_path, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(rendezvous, method, rank, 3 + rank, 60) for rank in range(2)]
        errors = [call.exception(30) for call in calls]  # long before the timeout
    assert all(isinstance(error, RendezvousError) for error in errors)
    (text,) = {str(error) for error in errors}
    assert re.search("rank 1 .* size of 4, rank 0 with 3|rank 0 .* size of 3, rank 1 with 4", text)


def test_a_rank_that_comes_when_a_world_is_complete_waits_for_another_world(tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'meet'}"
    with met(2, method), pytest.raises(RendezvousError, match=r"1 of 3 .* missing: 0, 1 "):
        rendezvous(method, 2, 3, 0.3)


@pytest.mark.parametrize(
    "method", ["http://a", "tcp://nowhere", "tcp://h:1", "file://host/x", "file://"]
)
def test_an_incomplete_method_is_a_value_error(method: str) -> None:
    rank = None if method == "tcp://h:1" else 0
    with pytest.raises(ValueError):
        rendezvous(method, rank, 1, 5)


def test_a_rank_outside_the_world_is_refused_before_connecting() -> None:
    for rank in (2, 3, 10**9):
        with pytest.raises(ValueError, match="outside a world of 2"):
            rendezvous("tcp://127.0.0.1:1", rank, 2, timeout=30.0)


def test_a_handler_gives_the_ranks_of_its_scheme_a_store() -> None:
    shared = HashStore()
    urls = []

    def handler(url: str, timeout: timedelta) -> Iterator[Met]:
        assert timedelta(seconds=0) < timeout <= timedelta(seconds=20)
        urls.append(url)
        query = parse_qs(urlsplit(url).query)
        yield shared, int(query["rank"][0]), int(query["world_size"][0])

    scheme = f"pigeon{os.urandom(4).hex()}"  # registered as long as the process lives
    dist.register_rendezvous_handler(scheme, handler)
    with met(2, f"{scheme}://loft/3?food=corn") as found:
        assert [(rank, size) for _, rank, size in found] == [(0, 2), (1, 2)]
        found[0][0].set("k", "v")
        assert found[1][0].get("k") == b"v"
    assert sorted(urls) == [
        f"{scheme}://loft/3?food=corn&rank={rank}&world_size=2" for rank in (0, 1)
    ]
    for known in (scheme, "tcp"):
        with pytest.raises(RuntimeError, match="has a handler already"):
            dist.register_rendezvous_handler(known, handler)
