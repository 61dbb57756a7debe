"""Values in a store are checked: hostile values end in a DistError or change nothing."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nc10d
from nc10d.backend.cpu.backend import make
from nc10d.backend.registry import register_backend, unregister_backend
from nc10d.base.stored import distinct, read_json, read_number, read_text, whole
from nc10d.errors import DistError, StoreError
from nc10d.group.world import own_world
from nc10d.store import HashStore

TIMEOUT = 1.0
HOSTILE: tuple[bytes, ...] = (
    b"",
    b"\xff\xfe",
    b"null",
    b"-1",
    b"1e400",
    b"9" * 6000,
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'"text"',
    b"[]",
    b"{}",
    b"[0, 0]",
    b'[[4096, 262144], [4096, "x"]]',
    b'{"areas": [[16384, 16384], [16384, 16384]]}',
    b'{"areas": [[16384, 262144], [1152921504606846976, 262144]]}',
    b'{"areas": [[20480, 262144], [20480, 262144]]}',
    b'{"kind": "PeerLost", "message": ["x"], "fields": {"rank": {}}}',
    b'{"what": [0, "x"], "without": {}}',
)


class Tampered:
    """A rank's view of a store: it records the keys that are read, and replaces a single value."""

    def __init__(self, store: HashStore, key: str = "", value: Any = b"") -> None:
        self._store, self._key, self._value = store, key, value
        self.read: dict[str, bytes] = {}
        self.counted: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _seen(self, key: str, value: bytes) -> bytes:
        self.read[key] = value
        if key != self._key:
            return value
        return self._value(value) if callable(self._value) else self._value

    def get(self, key: str) -> bytes:
        return self._seen(key, self._store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(map(self._seen, keys, self._store.multi_get(keys)))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._seen(key, self._store.compare_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        counted = self._store.add(key, amount)
        self.counted.add(key)
        return self._value if key == self._key and isinstance(self._value, int) else counted


def on_hosts(names: str, setup: Any) -> Any:
    return make(setup, names[setup.rank])


def use(rank: int, store: Any, size: int, backend: str, timeout: float) -> str:
    """Be a rank: form groups, compute; return how it ended."""
    with own_world():
        try:
            nc10d.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
            nc10d.monitored_barrier()
            group = nc10d.new_group([0, 1])
            local = nc10d.new_group([0, 1], use_local_synchronization=True)
            part = nc10d.split_group(split_ranks=[[0, 1]])
            for made in (None, group, local, part):
                x = np.full(5000, rank + 1.0)
                nc10d.all_reduce(x, group=made)
                if not (x == 3.0).all():
                    return f"wrong: {x[0]}"
            return "right"
        except DistError as error:
            return f"told: {error}"
        except BaseException as error:  # noqa: BLE001  (that is what the law forbids)
            return f"BROKEN: {error!r}"
        finally:
            if nc10d.is_initialized():
                nc10d.destroy_process_group()


def play(
    backend: str, key: str = "", value: Any = b"", timeout: float = TIMEOUT
) -> tuple[list[str], Tampered]:
    """Run two ranks; rank 1 sees `value` under `key`."""
    store = HashStore()
    store.set_timeout(timeout)
    views = [Tampered(store), Tampered(store, key, value)]
    ends = [""] * 2

    def be(rank: int) -> None:
        ends[rank] = use(rank, views[rank], 2, backend, timeout)

    ranks = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(2)]
    for thread in ranks:
        thread.start()
    start = time.monotonic()
    for thread in ranks:
        thread.join(20 * timeout)
    assert not any(thread.is_alive() for thread in ranks), (key, value, time.monotonic() - start)
    return ends, views[1]


@pytest.fixture(params=["aa", "ab"])
def names(request: pytest.FixtureRequest) -> Any:
    register_backend("hostile-hosts", functools.partial(on_hosts, request.param))
    yield request.param
    unregister_backend("hostile-hosts")


@pytest.mark.slow
def test_any_value_of_any_key_is_refused_or_changes_nothing(names: str) -> None:
    backend = "hostile-hosts"
    ends, view = play(backend, timeout=60.0)
    assert ends == ["right", "right"]
    assert len(view.read) > 12, view.read
    values = itertools.cycle(HOSTILE)
    read = {key: text for key, text in view.read.items() if names == "aa" or "endpoint" in key}
    assert len(read) > 2
    for key, honest in read.items():
        for value in (next(values), next(values), honest[: len(honest) // 2]):
            ends, _ = play(backend, key, value)
            bad = [end for end in ends if not end.startswith(("right", "told: "))]
            assert not bad, (key, value[:80], ends)
    for key in view.counted if names == "aa" else ():
        ends, _ = play(backend, key, 1 << 62)
        bad = [end for end in ends if not end.startswith(("right", "told: "))]
        assert not bad, (key, ends)


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps(json.loads(text) | fields).encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"pid": 1},
        {"process": "4026531836/1"},
        {"cores": [0, 1, 2, 3, 4, 5, 6, 7]},
        {"read_from": 1, "write_from": 1},
    ],
    ids=str,
)
def test_a_local_ranks_info_is_what_the_rank_itself_says(fields: dict[str, Any]) -> None:
    for end in play("cpu", "world/1/ranks/info/0", changed(**fields))[0]:
        assert end.startswith("told: "), end
        assert "rank" in end


@pytest.mark.parametrize(
    "areas",
    [
        [[16384, 262144], [1 << 60, 262144]],
        [[1 << 33, 262144], [1 << 33, 262144]],
        [[20480, 32768], [20480, 32768]],
    ],
)
def test_an_offset_is_used_only_where_its_owner_has_marked_it(areas: list[list[int]]) -> None:
    text = json.dumps({"areas": areas}).encode()
    mine = play("cpu", "world/1/outcome", text)[0][1]
    assert mine.startswith("told: "), mine
    assert "outcome" in mine


@pytest.mark.parametrize("raw", HOSTILE)
def test_readers_name_the_key(raw: bytes) -> None:
    readers: list[Callable[[], object]] = [
        lambda: read_number("some/key", raw, 0, 9),
        lambda: read_json("some/key", raw, lambda value: distinct(value["what"], 3)),
        lambda: read_json("some/key", raw, lambda value: whole(value, 5, 6)),
    ]
    for reader in readers:
        with pytest.raises(StoreError, match="some/key"):
            reader()
    with pytest.raises(StoreError, match="some/key"):
        read_text("some/key", raw + b"\xff")
