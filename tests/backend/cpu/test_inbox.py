"""An inbox: its holder keeps other threads from direct receives, and always releases it."""

from __future__ import annotations

import contextlib
import itertools
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from nc10d.backend.cpu.native import offsets
from nc10d.backend.cpu.transport.links import Inbox, UnexpectedMessage
from nc10d.testing import run_ranks

METHODS = Inbox.__enter__, Inbox.__exit__, Inbox.take_unexpected, Inbox._guard
CODES = {method.__code__ for method in METHODS}


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the `index`th line of an Inbox."""

    def __init__(self, index: int) -> None:
        self._left = index
        self.raised = False

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in CODES:
            return None
        if event == "line" and not self.raised:
            self.raised = self._left == 0
            self._left -= 1
            if self.raised:
                raise KeyboardInterrupt
        return self


def guarded(inbox: Inbox) -> int:
    return inbox.channel.get(offsets.C_GUARD)


def kept(tag: int) -> UnexpectedMessage:
    return UnexpectedMessage(tag, 0, np.zeros(0, np.uint8), None, "")  # type: ignore[arg-type]


def interrupted_at(inbox: Inbox, index: int) -> bool:
    """Hold an inbox, with Ctrl-C at line `index`; return whether there was such a line."""
    trace, before = Interrupt(index), sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt), inbox.lock, inbox:
            inbox.unexpected.append(kept(3))
            inbox.take_unexpected(3)
    finally:
        sys.settrace(before)
    return trace.raised


@pytest.mark.parametrize("early", [0, 2])
def test_after_ctrl_c_at_any_line_the_next_holder_repairs_the_inbox(early: int) -> None:
    def hold(group: Any) -> list[tuple[bool, bool]]:
        inbox = group.backend("cpu").group.links.inbox(1 - group.rank)
        inbox.unexpected.extend([kept(1)] * early)
        found = []
        for index in itertools.count():
            raised = interrupted_at(inbox, index)
            with inbox.lock, inbox:
                held = guarded(inbox) > len(inbox.unexpected)
            found.append((held, guarded(inbox) == len(inbox.unexpected)))
            while len(inbox.unexpected) > early:  # kept, and not taken
                inbox.unexpected.pop()
            if not raised:
                return found
        raise AssertionError

    for found in run_ranks(hold, 2):
        assert len(found) > len(METHODS)
        assert set(found) == {(True, True)}
