"""Consensus: all live ranks decide the same proposed value, whichever ranks die and whenever."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable

import pytest

from nc10d.backend.cpu.control.consensus import Consensus

Event = tuple[int, str] | None


class Network:
    """A simulated network of ranks: messages stay in order, deaths are noticed at random times.

    The end of a connection follows the messages sent on it. The kernel's report of a death on the
    same host may overtake them.
    """

    def __init__(self, size: int, chance: random.Random) -> None:
        self.chance, self.size = chance, size
        self.connections: defaultdict[tuple[int, int], deque[Event]] = defaultdict(deque)
        self.reports: list[tuple[int, int]] = []
        self.dead: set[int] = set()
        self.most = [chance.randint(0, 3 * size) for _ in range(size)]
        self.doomed = set(chance.sample(range(size), chance.randint(0, size - 1)))
        self.ranks = [Consensus(range(size), rank, self.sender(rank)) for rank in range(size)]

    def sender(self, me: int):  # type: ignore[no-untyped-def]
        def send(ranks: Iterable[int], step: int, value: str) -> None:
            for rank in ranks:
                if me in self.doomed and self.most[me] == 0:
                    self.die(me)
                self.most[me] -= 1
                if me not in self.dead:
                    self.connections[me, rank].append((step, value))

        return send

    def die(self, rank: int) -> None:
        if rank in self.dead:
            return
        self.dead.add(rank)
        for other in range(self.size):
            self.connections[rank, other].append(None)
            if self.chance.random() < 0.5:
                self.reports.append((other, rank))

    def step(self) -> bool:
        """Deliver one event; return False if none is left."""
        ready = [pair for pair, events in self.connections.items() if events]
        if self.reports and (not ready or self.chance.random() < 0.2):
            me, rank = self.reports.pop(self.chance.randrange(len(self.reports)))
            self.ranks[me].dismiss(rank)
        elif ready:
            sender, me = self.chance.choice(sorted(ready))
            event = self.connections[sender, me].popleft()
            if event is None:
                self.ranks[me].dismiss(sender)
            elif me not in self.dead:
                self.ranks[me].receive(sender, *event)
        return bool(ready or self.reports)


@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_all_live_ranks_decide_the_same_whichever_ranks_die(first: int) -> None:
    for seed in range(first, first + 1000):
        chance = random.Random(seed)
        network = Network(chance.randint(2, 6), chance)
        proposers = chance.sample(range(network.size), chance.randint(1, network.size))
        late = deque(proposers)
        while network.step() or late:
            if late and chance.random() < 0.3:
                rank = late.popleft()
                if rank not in network.dead:
                    network.ranks[rank].propose(f"of {rank}")
        live = [
            rank_state for rank, rank_state in enumerate(network.ranks) if rank not in network.dead
        ]
        decisions = {rank_state.decision for rank_state in live if rank_state.value}
        assert len(decisions) <= 1, f"seed {seed}: {decisions}"
        assert None not in decisions, f"seed {seed}: a rank waits for {live[0].awaited()}"
        assert decisions <= {f"of {rank}" for rank in proposers}
        if any(rank not in network.dead for rank in proposers):
            assert all(rank_state.value for rank_state in live), (
                f"seed {seed}: a rank was not asked"
            )
