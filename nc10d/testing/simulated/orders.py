"""Simulated ranks without delays: the order of steps is a choice, wherever it can be seen.

All other steps happen as soon as they can, as their order with others changes no result:

| step | it is a choice |
|---|---|
| a rank calls, computes, or goes on after a wait | never |
| a rank reads or changes the store | always |
| a message from a given rank meets its receive | never |
| a message meets a receive from any rank, or shows itself to a probe | always |
| an operation ends | if its rank looks at Works just now, or waits for any of several |

So a program of collectives has a single order. Ranks must share nothing but messages and the store.
Time moves on when no step is left. A look that sees nothing, while something could come, is also
tried once before that comes.
"""

# ruff: noqa: D102  (LocalExchange documents the methods)
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from nc10d import ops as O
from nc10d.base.call_site import here
from nc10d.testing.local_backend import _PostedOp
from nc10d.testing.simulated.posted_ops import copied, fits
from nc10d.testing.simulated.simulated_network import SimulatedExchange, SimulatedHub
from nc10d.testing.simulated.virtual_time import POLL_SECONDS, Choose, Label, RankTask, Scheduler

Action = Callable[[], object]


class NetworkStep(NamedTuple):
    """A network step; the job's `rank` can see it."""

    text: str
    label: Label
    rank: int
    action: Action


class OrderedScheduler(Scheduler):
    """A scheduler that asks `choose` only where the order of steps can be seen."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose)
        self.hub: OrderedHub | None = None
        self.story: list[str] = []
        """The steps so far whose order can be seen, in words."""
        self._sites: dict[int, str] = {}
        self._last_run: dict[int, int] = {}
        self._turns = itertools.count()
        self._looked: set[int] = set()
        """Ranks that have looked in vain while something could come."""

    def give_way(self, at: str) -> None:
        task = self.current()
        if at != "call" and task is not None:
            self._sites[task.number] = here()
            super().give_way(at)

    def look(self) -> None:
        task = self.current()
        if task is not None and self.spins():
            self.nap(task)
        elif task is not None:
            self.now += POLL_SECONDS
            self.give_way("look")

    def _pick(self) -> RankTask | None:
        assert self.hub is not None, "the hub has been made with this scheduler"
        while True:
            for task in self.runnable:
                if not task.at:
                    return task
            certain = next(self.hub.certain(), None)
            if certain is not None:
                self.act(certain)
                continue
            if self.event_is_due():
                self.next_event()
                continue
            steps = [*self.hub.steps()]
            seeing = {step.rank for step in steps}
            tasks = [task for task in self.runnable if not self._waits(task, seeing)]
            # By turns: a rank that waits by looking leaves the others time.
            tasks.sort(key=lambda task: self._last_run.get(task.number, -1))
            labels = [step.label for step in steps] + [("rank", task.number) for task in tasks]
            if not labels:
                return None
            place = self.choose(labels) if len(labels) > 1 else 0
            if place < len(steps):
                self._looked.discard(steps[place].rank)
                self.story.append(steps[place].text)
                self.act(steps[place].action)
                continue
            task = tasks[place - len(steps)]
            self._last_run[task.number] = next(self._turns)
            self.story.append(f"rank {task.number} goes on at {self._sites[task.number]}")
            if task.number in seeing:
                self._looked.add(task.number)
            return task

    def _waits(self, task: RankTask, seeing: set[int]) -> bool:
        return task.at == "look" and task.number in seeing and task.number in self._looked


class OrderedHub(SimulatedHub):
    """A job's network without delays."""

    def __init__(self, scheduler: OrderedScheduler, sync_sends: bool) -> None:
        super().__init__(scheduler, 0, (), sync_sends)
        scheduler.hub = self
        self.kind_of_exchange = OrderedExchange
        self.ends: dict[int, dict[int, Action]] = {}
        """Ends of operations that have not come yet, by rank in the job and number."""
        self._numbers = itertools.count()

    def end(self, rank: int, action: Action) -> None:
        """Let a rank's operation end, at some time."""
        self.ends.setdefault(rank, {})[next(self._numbers)] = action

    def certain(self) -> Iterator[Action]:
        """Yield ends of operations whose order is not seen."""
        for rank, ends in self.ends.items():
            task = self.scheduler.tasks[rank]
            unseen = rank in self.waits or len(ends) == 1
            if ends and (task.ended or (task.waiting and unseen)):
                yield ends.pop(next(iter(ends)))

    def steps(self) -> Iterator[NetworkStep]:
        """Yield the network's steps that can come next, as far as their order is seen."""
        for rank, ends in self.ends.items():
            task = self.scheduler.tasks[rank]
            if task.waiting or task.at == "look":
                for number in ends:
                    text, end = f"a call of rank {rank} ends", partial(self._end, rank, number)
                    yield NetworkStep(text, ("end", rank, number), rank, end)
        for name, exchange in self.exchanges.items():
            assert isinstance(exchange, OrderedExchange)
            yield from exchange.steps(name)

    def _end(self, rank: int, number: int) -> None:
        self.ends[rank].pop(number)()


class OrderedExchange(SimulatedExchange):
    """Messages are on their way until a receive takes them, or a probe sees them."""

    hub: OrderedHub

    def __init__(self, size: int, hub: SimulatedHub) -> None:
        super().__init__(size, hub)
        self._sent: list[_PostedOp] = []

    def _end(self, posted: _PostedOp, seconds: float = 0.0, sender: int | None = None) -> None:
        action = partial(posted.work.op_done, posted.place, sender)
        self.hub.end(self.members[posted.rank], action)

    def _match(self, posted: _PostedOp) -> None:
        if isinstance(posted.op, O.Send):
            self._sent.append(copied(posted))
            if not self.hub.sync_sends:
                posted.work.op_done(posted.place)
        else:
            self._messages.append(posted)
        while self.failure is None and (pair := self._certain()) is not None:
            self._take(*pair)

    def _certain(self) -> tuple[_PostedOp, _PostedOp] | None:
        """Return a message and the receive that must take it."""
        shown = [posted for posted in self._messages if isinstance(posted.op, O.Send)]
        for send in [*shown, *self._heads()]:
            receive = self._receive(send)
            if receive is not None and (receive.op.peer is not None or send in shown):
                return send, receive
        return None

    def _receive(self, send: _PostedOp) -> _PostedOp | None:
        """Return the first receive that a message fits."""
        receives = (posted for posted in self._messages if isinstance(posted.op, O.Recv))
        return next((receive for receive in receives if fits(send, receive)), None)

    def _heads(self) -> Iterator[_PostedOp]:
        """Yield the messages on their way that no earlier one of the same kind precedes."""
        seen = set()
        for send in self._sent:
            key = send.rank, send.op.peer, send.op.tag
            if key not in seen:
                seen.add(key)
                yield send

    def steps(self, name: str) -> Iterator[NetworkStep]:
        """Yield the steps of messages whose order is seen."""
        for send in self._heads():
            receive, dst = self._receive(send), send.op.peer
            text = f"a message of rank {send.rank} reaches rank {dst}"
            label = "message", name, send.rank, dst
            if receive is not None:
                action = partial(self._take, send, receive)
                yield NetworkStep(text, label, self.members[dst], action)
            elif self._looked_for(send):
                action = partial(self._show, send)
                yield NetworkStep(text, label, self.members[dst], action)

    def _looked_for(self, send: _PostedOp) -> bool:
        if send.op.peer not in self.probes:
            return False
        peer, tag = self.probes[send.op.peer]
        return peer in (None, send.rank) and tag in (None, send.op.tag)

    def _take(self, send: _PostedOp, receive: _PostedOp) -> None:
        self._forget(send)
        self._messages = [posted for posted in self._messages if posted is not receive]
        self._deliver(send, receive)

    def _show(self, send: _PostedOp) -> None:
        self._forget(send)
        self._messages.append(send)
        self.hub.scheduler.wake_all(self.hub.changed)

    def _forget(self, send: _PostedOp) -> None:
        self._sent = [posted for posted in self._sent if posted is not send]
        self._messages = [posted for posted in self._messages if posted is not send]

    def fail(self, reason: BaseException) -> None:
        self._sent.clear()
        super().fail(reason)
