"""A group's ranks agree on the groups that they make from it, before any of them forms.

Calls of `new_group` and its like are numbered on the parent group. The first rank to make a call
writes the call into the parent's store, under its number; every other rank compares its own call
with the written one. Ranks whose calls differ would wait for different members, or compute with
members that mean another group. So a rank that finds a difference fails the parent group: every
rank raises the same CollectiveMismatch, also a rank that waits for members of a later group.

Calls with `use_local_synchronization` have no common order. Each rank shows its latest such call in
the store. A rank that has waited in vain adds the others' calls to the error.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from nc10d.base.promise import copy_to_raise
from nc10d.base.run_to_end import run_to_end
from nc10d.base.signal_errors import raised_here
from nc10d.base.stored import read_stored, whole
from nc10d.base.text import digest
from nc10d.errors import CollectiveMismatch, RendezvousError, StoreError
from nc10d.store.base import Store

LOCAL = "use_local_synchronization=True"
_LONGEST = 2000
"""Most letters of a call in the store. A longer call ends with a digest of the whole."""
_MOST_SHOWN = 400


class GroupCalls:
    """A rank's calls that make groups from the group `name`, whose store is `store`."""

    def __init__(self, name: str, rank: int, store: Store) -> None:
        self._name, self._rank, self._store = name, rank, store
        self._made = 0
        self._local: Counter[Sequence[int]] = Counter()

    def agree(self, call: str, count: int = 1) -> int:
        """Number a call that makes `count` groups; return the number of the first.

        Does not wait for other ranks. CollectiveMismatch if a rank made another call under this
        number: the caller then fails the group.
        """
        number = self._made + 1
        self._made += count
        call = call if len(call) <= _LONGEST else f"{call[:_LONGEST]}... ({digest(call)})"
        stored = self._store.compare_set(_key(number), "", f"{self._rank} {call}")
        rank, first = read_stored(_key(number), stored, _rank_and_call)
        if first == call:
            return number
        raise CollectiveMismatch(
            f"the ranks make different groups of {self._name!r}: for its group number {number}, "
            f"rank {rank} called {_shown(first)}, rank {self._rank} called {_shown(call)}. All "
            "ranks make the same calls in the same order, also for groups that they are not in; to "
            f"have the members call alone, they pass {LOCAL} to new_group",
            rank=rank,
            group=self._name,
            op=call.partition("(")[0],
        )

    def number_local(self, members: tuple[int, ...], call: str) -> int:
        """Show a call that only `members` make; return its number among calls for the same list."""
        self._local[members] += 1
        self._store.set(f"local/{self._rank}", call)
        return self._local[members]

    @contextlib.contextmanager
    def told_on_failure(self, members: Sequence[int], call: str) -> Iterator[None]:
        """Add the other `members`' latest calls to the RendezvousError that a local call raises."""
        try:
            yield
        except raised_here(RendezvousError) as error:
            # With a `drop`: no exit of Python waits for a store that does not answer.
            others = run_to_end(partial(self._others, members), drop=list.clear)
            calls = [f"rank {self._rank} {call}", *others]
            whole = copy_to_raise(error)
            whole.args = (f"{error}; latest calls: {', '.join(calls)}",)
            raise whole from None

    def _others(self, members: Sequence[int]) -> list[str]:
        """Return the latest local calls of `members`, and all ranks' next call if there is one."""
        keys = {f"local/{rank}": f"rank {rank} " for rank in members if rank != self._rank}
        keys[_key(self._made + 1)] = "rank "
        store = self._store
        try:
            found = {key: store.get(key) for key in keys if store.check([key])}
        except StoreError:  # the store may be the reason
            return []
        return [
            f"{keys[key]}{text[:_LONGEST].decode(errors='replace')}" for key, text in found.items()
        ]


def _rank_and_call(text: bytes) -> tuple[int, str]:
    rank, _, call = text.decode().partition(" ")
    return whole(int(rank), 0, 1 << 30), call


def _shown(call: str) -> str:
    return call if len(call) <= _MOST_SHOWN else f"{call[:_MOST_SHOWN]}..."


def _key(number: int) -> str:
    return f"groups/{number}"
