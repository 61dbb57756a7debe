"""Consensus among several ranks on a value, although any rank may die at any moment.

A protocol without I/O, in rounds; round R belongs to rank R modulo the number of ranks.

| state of a rank | ends when |
|---|---|
| idle: no value | the rank proposes, or receives another rank's value |
| waiting: a value, not shown in this round | the rank has adopted the value of the round's rank |
| shown: value sent to all in this round | all ranks but the dismissed have shown it |
| decided | never; the rank answers later messages with the decision |

A waiting rank that dismisses its round's rank (dead or silent) begins the next round and asks that
round's rank for its value. A rank that receives a message for a later round enters that round.

Invariant: a rank decides a value only after all ranks but the dismissed have adopted the value. So
any later round's rank shows the same value, and no two ranks decide differently.

Deaths never lead to two decisions. Dismissing a live rank may, but only if that rank dismisses its
dismissers in the same consensus. A rank that waits for them instead adopts their value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

DECIDED = 1 << 30
"""The step in a message that carries the decision.

Otherwise a step R >= 0 shows a value in round R, and ~R carries the value from a rank that waits in
round R: the receiver joins the consensus, and that round.
"""

Send = Callable[[Iterable[int], int, str], None]
"""Called as send(ranks, step, value)."""


class Consensus:
    """Rank `me`'s part in a consensus; the caller serializes all calls."""

    def __init__(self, ranks: Sequence[int], me: int, send: Send) -> None:
        self.decision: str | None = None
        self.heard: set[int] = set()
        """The ranks from which a message has come."""
        self._ranks, self._me, self._send = list(ranks), me, send
        self._others = [rank for rank in ranks if rank != me]
        self._value: str | None = None
        self._round, self._shown = 0, False
        self._seen: defaultdict[int, set[int]] = defaultdict(set)
        self._dismissed: set[int] = set()

    @property
    def value(self) -> str:
        """This rank's current value; empty before there is a value."""
        return self._value or ""

    def propose(self, value: str) -> None:
        """Take part with `value`, unless this rank has adopted another value before."""
        if self._value is None:
            self._value = value
            self._send(self._others, ~self._round, value)
            self._advance()

    def receive(self, rank: int, step: int, value: str) -> None:
        """Process a message from another rank."""
        self.heard.add(rank)
        if self.decision is not None:
            # A rank that shows this round, or an earlier one, goes on by this rank's own show or
            # decision, which all ranks get. Others may wait for this rank: they need an answer.
            if step != DECIDED and (step < 0 or step > self._round):
                self._send([rank], DECIDED, self.decision)
        elif step == DECIDED:
            self._decide(value)
            # Other ranks may still wait for this rank to show its value: the decision will do.
            self._send(self._others, DECIDED, value)
        elif step < 0:
            self._answer(~step, value)
        elif step >= self._round:
            # Every rank shows the value of the round's rank, so the first show to arrive will do.
            self._seen[step].add(rank)
            self._adopt(step, value)
            self._advance()

    def _answer(self, number: int, value: str) -> None:
        """Take part, and enter round `number` if it is later: another rank waits there."""
        if self._value is None:
            self.propose(value)
        if number > self._round and self.decision is None:
            self._round, self._shown = number, False
            self._advance()

    def dismiss(self, rank: int) -> None:
        """Stop waiting for a rank."""
        if rank not in self._dismissed and rank != self._me:
            self._dismissed.add(rank)
            self._advance()

    def awaited(self) -> set[int]:
        """Return the ranks whose messages this rank needs in order to go on."""
        if self.decision is not None or self._value is None:
            return set()
        if self._shown:
            return set(self._others) - self._seen[self._round] - self._dismissed
        return {self._round_rank()}

    def _round_rank(self) -> int:
        return self._ranks[self._round % len(self._ranks)]

    def _ask(self) -> None:
        """Ask the round's rank for its value: in an earlier round it does not know of this one."""
        if self._value is not None and self._round_rank() != self._me:
            self._send([self._round_rank()], ~self._round, self._value)

    def _advance(self) -> None:
        if self._value is None or self.decision is not None:
            return
        while not self._shown:
            if self._round_rank() == self._me:
                self._adopt(self._round, self._value)
            elif self._round_rank() in self._dismissed:
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
