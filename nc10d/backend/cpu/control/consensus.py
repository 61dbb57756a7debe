"""One decision of several ranks, of which any may die at any moment: the same on all that live.

A protocol without I/O, by rounds. A round belongs to one rank, in the order of ranks. It shows
everybody its value; who sees that makes the value its own and shows it to everybody too; and who
has seen it of every rank that is not dismissed has decided. When a round's rank is dismissed (it is
dead, or silent) the next round begins. Nobody decides a value that another rank has not made its
own, so the next round's rank has the same one; and who has decided answers whoever asks later.

Deaths never lead to two decisions, whenever they come. Dismissing a rank that lives may do so only
if it dismisses, in the same agreement, those who have dismissed it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

DECIDED = 1 << 30
"""The step of a message that tells what has been decided.

In round R, R is the step of who shows its value, and ~R of who asks the round's rank to do so.
"""

Send = Callable[[Iterable[int], int, str], None]
"""Called as send(ranks, step, value)."""


class Consensus:
    """One decision, as the rank `me` takes part in it; not for several threads at once."""

    def __init__(self, ranks: Sequence[int], me: int, send: Send) -> None:
        self.decision: str | None = None
        self.heard: set[int] = set()
        self._ranks, self._me, self._send = list(ranks), me, send
        self._others = [rank for rank in ranks if rank != me]
        self._value: str | None = None
        self._round, self._shown = 0, False
        self._seen: defaultdict[int, set[int]] = defaultdict(set)
        self._dismissed: set[int] = set()

    @property
    def value(self) -> str:
        """The value of this rank by now; nothing before it has one."""
        return self._value or ""

    def propose(self, value: str) -> None:
        """Take part; the value counts unless another one has come before."""
        if self._value is None:
            self._value = value
            self._send(self._others, ~self._round, value)
            self._go_on()

    def hear(self, rank: int, step: int, value: str) -> None:
        """Take in what a rank says."""
        self.heard.add(rank)
        if self.decision is not None:
            if step != DECIDED and (step < 0 or step > self._round):
                self._send([rank], DECIDED, self.decision)
        elif step == DECIDED:
            self._decide(value)
            self._send(self._others, DECIDED, value)  # they may count on what I have not shown
        elif step < 0:
            self._answer(~step, value)
        elif step >= self._round:
            self._seen[step].add(rank)
            self._adopt(step, value)
            self._go_on()

    def _answer(self, number: int, value: str) -> None:
        """Take part with a value, or in a later round: it is mine, and somebody waits for it."""
        if self._value is None:
            self.propose(value)
        if number > self._round and self.decision is None:
            self._round, self._shown = number, False
            self._go_on()

    def dismiss(self, rank: int) -> None:
        """Wait for a rank no more."""
        if rank not in self._dismissed and rank != self._me:
            self._dismissed.add(rank)
            self._go_on()

    def awaited(self) -> set[int]:
        """Return the ranks without which this one can't go on."""
        if self.decision is not None or self._value is None:
            return set()
        if self._shown:
            return set(self._others) - self._seen[self._round] - self._dismissed
        return {self._whose()}

    def _whose(self) -> int:
        return self._ranks[self._round % len(self._ranks)]

    def _ask(self) -> None:
        """Have the round's rank show its value: it may be content in an earlier round."""
        if self._value is not None and self._whose() != self._me:
            self._send([self._whose()], ~self._round, self._value)

    def _go_on(self) -> None:
        if self._value is None or self.decision is not None:
            return
        while not self._shown:
            if self._whose() == self._me:
                self._adopt(self._round, self._value)
            elif self._whose() in self._dismissed:
                self._round += 1
                self._ask()
            else:
                return
        if not self.awaited():
            self._decide(self._value)

    def _adopt(self, number: int, value: str) -> None:
        if number > self._round or not self._shown:
            self._round, self._value, self._shown = number, value, True
            self._send(self._others, number, value)

    def _decide(self, value: str) -> None:
        self.decision = self._value = value
