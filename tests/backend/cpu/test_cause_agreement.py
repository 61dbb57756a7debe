"""An agreement: whoever dies, whenever, all who live decide the same, and something proposed."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable

import pytest

from nc10d.backend.cpu.control.consensus import Consensus

Parcel = tuple[int, str] | None


class Table:
    """Ranks around a table: lines that keep their order, deaths that each learns in its own time.

    A line's end comes behind what was sent on it; the kernel's word on a host mate may overtake.
    """

    def __init__(self, size: int, chance: random.Random) -> None:
        self.chance, self.size = chance, size
        self.lines: defaultdict[tuple[int, int], deque[Parcel]] = defaultdict(deque)
        self.words: list[tuple[int, int]] = []
        self.dead: set[int] = set()
        self.most = [chance.randint(0, 3 * size) for _ in range(size)]
        self.doomed = set(chance.sample(range(size), chance.randint(0, size - 1)))
        self.seats = [Consensus(range(size), rank, self.sender(rank)) for rank in range(size)]

    def sender(self, me: int):  # type: ignore[no-untyped-def]
        def send(ranks: Iterable[int], step: int, value: str) -> None:
            for rank in ranks:
                if me in self.doomed and self.most[me] == 0:
                    self.die(me)
                self.most[me] -= 1
                if me not in self.dead:
                    self.lines[me, rank].append((step, value))

        return send

    def die(self, rank: int) -> None:
        if rank in self.dead:
            return
        self.dead.add(rank)
        for other in range(self.size):
            self.lines[rank, other].append(None)
            if self.chance.random() < 0.5:
                self.words.append((other, rank))

    def step(self) -> bool:
        """Let one thing happen; False if nothing is left to come."""
        ready = [line for line, parcels in self.lines.items() if parcels]
        if self.words and (not ready or self.chance.random() < 0.2):
            me, rank = self.words.pop(self.chance.randrange(len(self.words)))
            self.seats[me].dismiss(rank)
        elif ready:
            sender, me = self.chance.choice(sorted(ready))
            parcel = self.lines[sender, me].popleft()
            if parcel is None:
                self.seats[me].dismiss(sender)
            elif me not in self.dead:
                self.seats[me].hear(sender, *parcel)
        return bool(ready or self.words)


@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_all_who_live_decide_the_same_whoever_dies(first: int) -> None:
    for seed in range(first, first + 1000):
        chance = random.Random(seed)
        table = Table(chance.randint(2, 6), chance)
        proposers = chance.sample(range(table.size), chance.randint(1, table.size))
        late = deque(proposers)
        while table.step() or late:
            if late and chance.random() < 0.3:
                rank = late.popleft()
                if rank not in table.dead:
                    table.seats[rank].propose(f"of {rank}")
        live = [seat for rank, seat in enumerate(table.seats) if rank not in table.dead]
        decisions = {seat.decision for seat in live if seat.value}
        assert len(decisions) <= 1, f"seed {seed}: {decisions}"
        assert None not in decisions, f"seed {seed}: somebody waits for {live[0].awaited()}"
        assert decisions <= {f"of {rank}" for rank in proposers}
        if any(rank not in table.dead for rank in proposers):
            assert all(seat.value for seat in live), f"seed {seed}: somebody was not asked"
