"""One rank's channels, in a table that the worker goes through.

The worker reads the table without a lock. A channel that is removed therefore stays alive until the
worker can no longer hold the address.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from functools import partial

import numpy as np

from nc10d.backend.cpu.engine.channel import Channel, ChannelSpec, Words
from nc10d.backend.cpu.engine.cpu_policy import WaitPolicy
from nc10d.backend.cpu.memory.arena import Arena
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain

MAX_CHANNELS = 16384


class Channels:
    """All of a rank's channels; `rank_block` is the block that they share, for the engine."""

    def __init__(self, arena: Arena, rank_block: Words, bit: int, waiting: WaitPolicy) -> None:
        """Make an empty table; `bit` is this rank's in masks of its host's ranks."""
        self.watched = False
        """Whether a worker goes through the table."""
        self._arena, self._rank_block, self._bit, self._waiting = arena, rank_block, bit, waiting
        self._table: Words = np.zeros(MAX_CHANNELS, np.int64)
        self._labels = itertools.count(1)
        self._channels: dict[int, Channel] = {}
        self._spare: list[int] = []
        self._retired: list[tuple[int, Channel]] = []
        self._lock = threading.RLock()
        self._set(at.P_CHANNELS, plain.address(self._table))

    def make(self, shared: ChannelSpec) -> Channel:
        """Make a channel, and put it into the worker's table; MemoryError if the table is full."""
        label, make_private = (
            next(self._labels),
            partial(_make_private, self._arena, self._rank_block),
        )
        block: int = plain.address(self._rank_block)
        channel = Channel(shared, block, self._bit, self._waiting, label, make_private)
        with self._lock:
            # An index is used before it leaves `_spare`: a signal handler's error loses none.
            while self._spare and self._spare[0] in self._channels:
                heapq.heappop(self._spare)
            index = self._spare[0] if self._spare else 1 + max(self._channels, default=-1)
            if index >= MAX_CHANNELS:
                raise MemoryError(f"more than {MAX_CHANNELS} groups and links at a time")
            self._channels[index] = channel
            self._table[index] = channel.address
            self._set(at.P_COUNT, max(self._get(at.P_COUNT), index + 1))
        return channel

    def retire(self, channel: Channel) -> None:
        """Remove a stopped channel from the table; the worker may be reading it right now."""
        with self._lock:
            for index, each in list(self._channels.items()):
                if each is channel:
                    self._table[index] = 0
                    del self._channels[index]
                    heapq.heappush(self._spare, index)
            count = self._get(at.P_COUNT)
            while count and count - 1 not in self._channels:
                count -= 1
            self._set(at.P_COUNT, count)
            # After two more passes the worker holds no address from an earlier read.
            if self.watched:
                rounds = self._get(at.P_PASSES)
                self._retired = [(r, c) for r, c in self._retired if r + 2 > rounds]
                self._retired.append((rounds, channel))

    def disown(self) -> None:
        """Lock a forked child's copies for good, so that no wait advances them."""
        self._lock = threading.RLock()
        for channel in self._channels.values():
            channel.disown()

    def _get(self, field: int) -> int:
        return int(self._rank_block[field // 8])

    def _set(self, field: int, value: int) -> None:
        self._rank_block[field // 8] = value


def _make_private(arena: Arena, rank_block: Words, offset: int, nbytes: int) -> None:
    """Withdraw a piece of this rank's arena: no other process can write there any more."""
    # Before the pages are replaced: from now on the engine exposes nothing below this offset.
    floor = arena.retire()
    rank_block[at.P_FLOOR // 8] = floor
    arena.make_private(offset, nbytes)
