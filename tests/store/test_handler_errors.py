"""An error of a signal's handler at any point of a store's call leaves the store usable."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interrupts import raise_at

from nc10d.errors import QueueEmptyError, StoreTimeout
from nc10d.store import FileStore, HashStore, PrefixStore, Store, TCPStore

# An error that comes between two instructions of a clean-up leaves the rest of it to finalizers.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
LONG, SHORT = 30.0, 0.002
CALLS: dict[str, Callable[[Store], object]] = {
    "set": lambda store: store.set("k", "v"),
    "get": lambda store: store.get("old"),
    "add": lambda store: store.add("n", 1),
    "check": lambda store: store.check(["k"]),
    "compare_set": lambda store: store.compare_set("k", "", "v"),
    "wait": lambda store: store.wait(["old"], LONG),
    "wait in vain": lambda store: _in_vain(lambda: store.wait(["never"], SHORT)),
    "multi_set": lambda store: store.multi_set(["k", "l"], ["v", "w"]),
    "queue_push": lambda store: store.queue_push("q", "v"),
    "queue_pop": lambda store: _in_vain(lambda: store.queue_pop("q", block=False)),
    "delete_key": lambda store: store.delete_key("k"),
    "barrier": lambda store: store.barrier("b", 1, LONG),
}


class Interrupted(TimeoutError):
    """The error of a user's handler."""


def _in_vain(call: Callable[[], object]) -> None:
    with contextlib.suppress(StoreTimeout, QueueEmptyError):
        call()


@contextlib.contextmanager
def store_of(kind: str, folder: Path) -> Iterator[Store]:
    if kind == "hash":
        yield PrefixStore("p", HashStore())
        return
    made = TCPStore if kind == "tcp" else FileStore
    place = ("127.0.0.1",) if kind == "tcp" else (folder / "file",)
    options = {"is_master": True} if kind == "tcp" else {}
    with contextlib.closing(made(*place, timeout=LONG, **options)) as store:
        yield store


def in_another_thread(call: Callable[[], object], timeout: float = LONG) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
@pytest.mark.parametrize("name", CALLS)
def test_others_go_on_after_an_error_at_any_point_of_a_call(
    kind: str, name: str, stride: int, tmp_path: Path
) -> None:
    with store_of(kind, tmp_path) as store:
        store.set("old", "1")
        point, reached = 0, True
        while reached:
            error = Interrupted(f"at point {point}")  # it is kept, and its frames with it
            reached = raise_at(point, error, lambda: CALLS[name](store))

            def others(point: int = point) -> None:
                assert store.get("old") == b"1"
                store.set(f"new {point}", "2")

            thread = in_another_thread(others)
            thread.join(LONG / 2)
            assert not thread.is_alive(), f"the store is locked after an error at point {point}"
            assert store.check([f"new {point}"])
            point += stride
        assert point > 10


def test_an_error_at_any_point_of_the_opening_of_a_file_comes_out(tmp_path: Path) -> None:
    point, reached = 0, True
    while reached:

        def open_and_close(path: Path = tmp_path / str(point)) -> None:
            with contextlib.closing(FileStore(path, 1, timeout=LONG)) as store:
                store.set("k", "v")

        reached = raise_at(point, Interrupted(f"at point {point}"), open_and_close)
        open_and_close()
        point += 5
    assert point > 100


def test_a_value_that_was_set_wakes_those_that_wait_for_it() -> None:
    point, reached = 0, True
    while reached:
        store, error = HashStore(), Interrupted(f"at point {point}")
        waits = in_another_thread(lambda store=store: store.wait(["k"], LONG))
        reached = raise_at(point, error, lambda store=store: store.set("k", "v"))
        if not store.check(["k"]):
            store.set("k", "v")
        waits.join(LONG / 2)
        assert not waits.is_alive(), f"nobody was woken after an error at point {point}"
        point += 1
