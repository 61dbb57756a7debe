"""Receives from any rank: NCCL needs to know from whom, so the sender is found first.

A rank that receives from any rank says so once for each tag, by a text to all ranks. From then on
every rank tells the receiver how many messages with that tag it has launched to this rank. The
receiver knows how many have been received: where there are more, a message waits. Programs without
such receives send no text.

A receive takes its sender when a thread waits for the receive or tests it. Receives take their
messages in posting order: behind a receive without a sender, later ones wait in a queue, also those
from a named rank; with NcclOptions(links="tag") only those with the same tag. A receive whose Work
is dropped leaves the queue.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

from nc10d.arrays.validate import validate
from nc10d.backend.device_work import DeviceWork
from nc10d.backend.nccl.works import NcclWork
from nc10d.backend.shared_board import GroupMessages
from nc10d.base.deadline import NEVER, Deadline
from nc10d.base.promise import FAILED, PENDING
from nc10d.base.signal_errors import Thread
from nc10d.errors import CollectiveTimeout
from nc10d.ops import Recv

_ANY, _SENT = "device/any", "device/sent"
_SLICE = 0.05
Place = tuple[int, int]
"""A rank and a tag."""


class Senders:
    """The counts of a group's messages on this rank; any thread may call."""

    def __init__(
        self, rank: int, size: int, messages: GroupMessages | None, links: str | None
    ) -> None:
        """`links` are those of NcclOptions."""
        self.rank, self._size = rank, size
        self.links = links
        self.messages = messages
        self._sent: Counter[Place] = Counter()
        self._received: Counter[Place] = Counter()
        self._wanted: set[Place] = set()
        self._asked: set[int] = set()
        self._lock = threading.RLock()
        self.matching = threading.RLock()
        """Held while receives take their senders. Acquire it before `_lock`, not inside."""
        self._queues: dict[int, deque[weakref.ref[QueuedNcclReceive]]] = {}
        if messages is not None:
            messages.on_value = self._heard

    def sent(self, places: Iterable[Place]) -> None:
        """Count messages that have been launched to ranks, with tags."""
        with self._lock:
            for place in places:
                if place not in self._sent and self._asks(place):  # it asked before this backend
                    self._wanted.add(place)
                self._sent[place] += 1
                if place in self._wanted:
                    self._tell(place)

    def received(self, places: Iterable[Place]) -> None:
        """Count receives that have been launched from ranks, with tags."""
        with self._lock:
            self._received.update(places)

    def ask(self, tag: int) -> None:
        """Have all ranks tell this rank of messages with a tag."""
        assert self.messages is not None, "refused without a failure detector"
        with self._lock:
            if tag not in self._asked:
                self._asked.add(tag)
                self.messages.set(f"{_ANY}/{self.rank}/{tag}", "")

    def join(self, work: QueuedNcclReceive, tag: int) -> None:
        """Append a receive to the queue for its tag."""
        with self.matching:
            self._queues.setdefault(self._key(tag), deque()).append(weakref.ref(work))

    def _key(self, tag: int) -> int:
        """Return the queue for a tag: all have the same one where messages keep their order."""
        return tag if self.links == "tag" else 0

    def advance(self, tag: int) -> bool:
        """Launch a queue's receives in order, as far as possible; return whether any is left."""
        key = self._key(tag)
        if key not in self._queues:
            return False
        with self.matching:
            queue = self._queues.get(key)
            while queue:
                first = queue[0]()
                if first is not None and not first.launch_if_sender_known():
                    return True
                queue.popleft()
            self._queues.pop(key, None)
        return False

    def find(self, tag: int) -> int | None:
        """Return a rank from which a message with a tag waits, None if there is none."""
        assert self.messages is not None, "refused without a failure detector"
        for rank in range(self._size):
            told = self.messages.value(f"{_SENT}/{rank}/{self.rank}/{tag}")
            if told is not None and int(told) > self._received[rank, tag]:
                return rank
        return None

    def _asks(self, place: Place) -> bool:
        rank, tag = place
        return self.messages is not None and self.messages.value(f"{_ANY}/{rank}/{tag}") is not None

    def _heard(self, rank: int, key: str, _value: str) -> None:
        if not key.startswith(f"{_ANY}/"):
            return
        place = rank, int(key.rpartition("/")[2])
        with self._lock:
            self._wanted.add(place)
            if self._sent[place]:
                self._tell(place)

    def _tell(self, place: Place) -> None:
        assert self.messages is not None, "a rank has asked by them"
        rank, tag = place
        self.messages.set(f"{_SENT}/{self.rank}/{rank}/{tag}", str(self._sent[place]), (rank,))


class QueuedNcclReceive(DeviceWork):
    """A receive in a queue: once the sender is known, the Work that receives from that rank."""

    __slots__ = ("_check", "_error", "_inner", "_launch", "_senders", "blocks", "deadline")

    def __init__(
        self,
        op: Recv,
        timeout: float,
        senders: Senders,
        launch: Callable[[Recv, float], NcclWork],
        check: Callable[[], None],
    ) -> None:
        """`launch` launches a receive with a sender; `check` raises the group's failure."""
        super().__init__((op,))
        self.blocks = False
        self.deadline = Deadline.after(timeout)
        self._senders, self._launch, self._check = senders, launch, check
        self._inner: NcclWork | None = None
        self._error: Exception | None = None
        senders.ask(op.tag)
        senders.join(self, op.tag)

    @property
    def _op(self) -> Recv:
        (op,) = self.ops
        assert isinstance(op, Recv)
        return op

    def launch_if_sender_known(self) -> bool:
        """Launch this receive, which is first in its queue; False while the sender is unknown.

        The caller holds `Senders.matching`.
        """
        if self._over():
            return True
        try:
            self._check()
            named, tag = self._op.peer, self._op.tag
            source = self._senders.find(tag) if named is None else named
            if source is None:
                return False
            self._inner = self._launch(Recv(self._op.x, source, tag), self.deadline.remaining())
            self._result = source  # also while the message is still on its way
        except Exception as error:  # noqa: BLE001  (its own Work raises it)
            self._error = error  # `_match` ends the Work without the lock: callbacks may take long
        return True

    def _over(self) -> bool:
        return self._inner is not None or self._error is not None or self._state != PENDING

    def _match(self) -> bool:
        """Launch the receive if possible; return whether it is launched or has failed."""
        if not self._over():
            self._senders.advance(self._op.tag)
        if self._error is not None:
            self._finish(self._error)
        return self._over()

    def _matched(self, until: Deadline) -> bool:
        """Block until the receive is launched, has failed, or `until`; return whether launched."""
        messages = self._senders.messages
        assert messages is not None, "refused without a failure detector"
        while not self._match():
            if self.deadline.expired():
                self._time_out()
                return True
            if until.expired():
                return False
            # Nothing is launched under the texts' lock, which a launching thread needs.
            messages.until(self._is_known, until.slice(self.deadline.slice(_SLICE)))
        return True

    def _time_out(self) -> None:
        rank, tag = self._senders.rank, self._op.tag
        peer = self._op.peer
        source = "any rank" if peer is None else f"rank {peer}, behind one from any rank"
        text = (
            f"rank {rank}: no rank has sent a message with tag {tag} within the timeout of a "
            f"receive from {source}"
        )
        with self._senders.matching:
            if not self._over():
                self._error = CollectiveTimeout(text, op="recv")
        self._match()

    def _is_known(self) -> bool:
        return self._senders.find(self._op.tag) is not None

    def _follow(self) -> None:
        inner = self._inner
        if inner is not None and inner._state != PENDING and self._state == PENDING:
            self._finish(inner._exception, inner._result)

    def _await_queued(self) -> None:
        self._matched(NEVER)
        if self._inner is not None:
            self._inner._await_queued()
            if self._inner._state == FAILED:
                self._follow()

    def block_stream(self, stream: int) -> None:
        """Make a stream wait for the message, unless it has come."""
        if self._inner is not None:
            self._inner.block_stream(stream)

    def _poll(self) -> None:
        if self._match() and self._inner is not None:
            self._inner._poll()
            self._follow()

    def _block(self, deadline: Deadline) -> None:
        if self._matched(deadline) and self._inner is not None:
            self._inner._block(deadline)
            self._follow()

    def _watch(self) -> None:
        # A thread of its own: the sender is found only where a thread waits.
        wait = partial(self._block, NEVER)
        Thread(target=wait, name="nc10d-nccl-any-source", daemon=True).start()


def checked(op: Recv, rank: int, size: int, senders: Senders) -> None:
    """Raise ValueError or TypeError for a receive from any rank that can't be made."""
    validate(op, rank, size)
    if senders.messages is None:
        raise ValueError(
            "recv: src can't be None in a group without the CPU backend, which finds the sender"
        )
    if senders.links == "group":  # later collectives would go first
        raise ValueError('recv: src can\'t be None with NcclOptions(links="group")')
