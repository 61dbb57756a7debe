"""The checks for writers of stores, Works and groups: nc10d's own pass, faulty ones are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nc10d import DType
from nc10d.store import FileStore, HashStore, TCPStore
from nc10d.store.base import Store
from nc10d.testing import check_process_group, check_store, check_work
from nc10d.work import Work


class Same:
    """Makes the same store again and again."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __call__(self) -> Store:
        return self.store


def test_own_stores_pass(tmp_path: Path) -> None:
    assert check_store(Same(HashStore())) >= 13
    assert check_store(lambda: FileStore(str(tmp_path / "store"), 2)) >= 9
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    client = lambda: TCPStore("127.0.0.1", server.port, 1, is_master=False)  # noqa: E731
    assert check_store(client) >= 13
    server.close()


class Forgetful(HashStore):
    """Does not count an add whose sum is even."""

    def add(self, key: str, amount: int) -> int:
        total = super().add(key, amount)
        if total % 2 == 0:
            super().add(key, -amount)
        return total


class Hasty(HashStore):
    """Returns nothing where it should wait."""

    def get(self, key: str) -> bytes:
        return super().get(key) if self.check([key]) else b""


@pytest.mark.parametrize(
    ("kind", "words"), [(Forgetful, "adds of several clients"), (Hasty, "get waits until the key")]
)
def test_a_faulty_store_is_named(kind: type[Store], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_store(Same(kind()))


def pending(kind: type[Work] = Work) -> tuple[Work, Any]:
    work = kind()
    return work, work._finish


class Unsure(Work):
    """Is completed before its end."""

    __slots__ = ()

    def is_completed(self) -> bool:
        return True


class Silent(Work):
    """Keeps its error to itself."""

    __slots__ = ()

    def wait(self, timeout: Any = None) -> bool:
        try:
            return super().wait(timeout)
        except RuntimeError:
            return False


def test_works_pass_and_faulty_ones_are_named() -> None:
    assert check_work(pending) == 8
    with pytest.raises(AssertionError, match="a pending work answers"):
        check_work(lambda: pending(Unsure))
    with pytest.raises(AssertionError, match="returned False, must raise"):
        check_work(lambda: pending(Silent))


class Wrapped:
    """A group around another one; `off` is added to its sums."""

    def __init__(self, group: Any, off: int = 0) -> None:
        self._group, self._off = group, off

    def all_reduce(self, x: Any, *arguments: Any, **named: Any) -> Any:
        if self._off and x.size and x.dtype == np.float32:
            x[...] += self._off
        return self._group.all_reduce(x, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def test_a_wrapped_group_passes_and_a_faulty_one_is_named() -> None:
    dtypes = [DType.FLOAT32]
    assert check_process_group(Wrapped, [1], dtypes) > 50
    with pytest.raises(AssertionError, match=r"all_reduce \w+ of float32"):
        check_process_group(lambda group: Wrapped(group, 1), [2], dtypes)
