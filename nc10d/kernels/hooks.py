"""Hooks of a prepared call: C functions that run before and after it.

A hook has one argument, the address of a block of words. An entry point runs the hook `before`,
then the call, and then the hook `after`. Both hooks hold the GIL, and the call does not. A call may
be several messages: after each, the hook `count`, without the GIL, tells how many there are. The
words behind the first H_WORDS are the hooks' own.

    H_BEFORE, H_COUNT, H_AFTER     addresses of the hooks
    H_TASK                         what the hooks have to do, in a code of their own
    H_VALUE, H_PLACES              addresses of any two objects: arguments of the hooks
    H_RAN                          how many messages have ended, or 1 for a collective

`before` and `after` answer 0, or RAISED with an exception set, which the entry point then raises.
`before` may answer REFUSED: the call is not run. `after` may answer UNFINISHED: it has not done its
task, and has changed nothing. No call has these answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

H_BEFORE, H_COUNT, H_AFTER, H_TASK, H_VALUE, H_PLACES, H_RAN = range(0, 56, 8)
H_WORDS = 7
REFUSED, UNFINISHED, RAISED = 64, 65, 66


class Hooks(Protocol):
    """Hooks as Python sees them, and the memory on which they work. One call at a time uses them.

    `block` is the array of their block, None before the first `make_block`.
    """

    block: Any
    ran: int
    """How many messages have ended, or 1 for a collective; valid after `go_on`."""

    @property
    def arrays(self) -> Mapping[int, tuple[Any, Any]]:
        """The arguments x and y of a prepared call, by task; for messages, all arrays and a tag."""

    def make_block(self) -> Any:
        """Make the block and return it; may block to compile the hooks."""

    def failed(self, error: Exception) -> int:
        """Return UNFINISHED or REFUSED after a hook has raised an error."""

    def go_on(self, answer: int | None) -> None:
        """Begin the rest of a call that has not done all; None: no hook has run."""


H = TypeVar("H", bound=Hooks)


class HooksPool(Protocol[H]):
    """Hooks that no call uses now."""

    def pop(self) -> H:
        """Take hooks; IndexError if there are none."""

    def append(self, hooks: H, /) -> None:
        """Give hooks back."""

    def make(self) -> H:
        """Return new hooks."""
