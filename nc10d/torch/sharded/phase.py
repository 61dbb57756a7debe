"""The phases of a fully sharded module: which backward pass is expected, and whether that reduces.

Contract: a state machine without tensors and without communication; passes.py acts.

    phase       the module waits for
    IDLE        a forward pass
    EXPECTED    a backward pass: a forward pass has begun that records a graph
    RUNNING     the end of a backward pass, which autograd reports

    event                            method      from               to
    a forward pass with a graph      forward     IDLE, EXPECTED     EXPECTED
    a forward pass without a graph   forward     any                the same
    a checkpoint calls that again    recompute   IDLE, EXPECTED     EXPECTED, if it was not yet
                                                 RUNNING            RUNNING
    a hook of a backward pass        backward    IDLE, EXPECTED     RUNNING: its end is queued
                                                 RUNNING            RUNNING
    the end of a backward pass       end         RUNNING            IDLE
    an exception in a forward pass   leave       EXPECTED           IDLE: the ranks are told
    an exception in a backward pass  leave       RUNNING            IDLE: the ranks are told

A backward pass that begins in IDLE is a second one of a kept graph: `reducing` is as in the first.
"""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """The event for which a module waits."""

    IDLE = auto()
    EXPECTED = auto()
    RUNNING = auto()


class PassState:
    """The phase of a module, by the table at the head of this file; each method is an event."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.reducing = False
        """Whether the running or expected backward pass reduces gradients; in IDLE, the last."""
        self.holds_memory = False
        """Whether freed units keep their memory, since a graph of create_graph may read it."""
        self._creates_graph = False
        self._kept: bool | None = None

    def forward(self, reduces: bool, graph: bool) -> None:
        """Begin a forward pass, which records a graph or not."""
        if graph:
            self._expect(reduces)
        else:
            self._kept = reduces

    def recompute(self) -> None:
        """Begin a forward pass again, with a graph: a checkpoint around the module calls it."""
        if self._kept is not None:
            self._expect(self._kept)

    def _expect(self, reduces: bool) -> None:
        """Expect a backward pass, which reduces if this or another expected pass reduces."""
        # A forward pass in no_sync may stand between a reduced forward pass and its backward pass.
        self.reducing = reduces or (self.reducing and self.phase is not Phase.IDLE)
        self._kept = None
        if self.phase is Phase.IDLE:
            self.phase = Phase.EXPECTED

    def backward(self, creates_graph: bool) -> bool:
        """Note a hook of a backward pass; return whether that is the pass's first."""
        if self.phase is Phase.RUNNING:
            return False
        self.phase, self._creates_graph = Phase.RUNNING, creates_graph
        self.holds_memory |= creates_graph
        return True

    def end(self) -> None:
        """End the backward pass; a graph that it has created goes on reading memory."""
        self.phase, self.holds_memory = Phase.IDLE, self._creates_graph

    def leave(self, phase: Phase) -> None:
        """Leave a forward pass (EXPECTED) or a backward pass (RUNNING) by an exception."""
        if self.phase is phase:
            self.phase = Phase.IDLE
