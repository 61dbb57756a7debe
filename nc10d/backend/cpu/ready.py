"""What is known already and ready to run again: the base of known operations and messages."""

from __future__ import annotations

from typing import Any

from nc10d.backend.cpu import sites
from nc10d.backend.cpu.channel import Channel, Words
from nc10d.backend.cpu.native import layout as at
from nc10d.kernels.lazy import EntryPoint
from nc10d.ops import Op


class Ready:
    """What nc10d.dispatch.Known asks for: `run(words, x, y)` does it again, on its channel."""

    __slots__ = ("channel", "flying", "run", "words")

    def __init__(self, channel: Channel, words: Words) -> None:
        self.channel, self.flying, self.words = channel, channel.flying, words
        self.run: EntryPoint = self._first

    def entry(self) -> EntryPoint:
        """Return the compiled function that runs it; may block to compile it."""
        raise NotImplementedError

    def ops(self, x: Any, y: Any) -> tuple[Op, ...]:
        """Return the operation on these arguments, for whoever has to tell of it."""
        raise NotImplementedError

    def end(self) -> None:
        """Tidy up after what began in `run` and was driven to its end, or failed, elsewhere."""

    def _first(self, words: Words, x: Any, y: Any) -> int:
        """Run it for the first time; from then on the compiled function is called directly."""
        self.run = run = self.entry()
        # This frame is one of ours that the engine must learn: else it asks in vain each time.
        while (answer := run(words, x, y)) == at.NEW_SITE:
            sites.learn()
        return int(answer)
