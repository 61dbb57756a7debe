"""Hooks of a prepared call: C functions of nc10d that run before and after its operation.

They are no code of the user's. A hook has one argument, the address of a block of words. An entry
point runs the hook `before`, then the operation, then the hook `after`. Both hooks hold the GIL;
the operation does not. For messages it is several operations: the hook `count`, called after each
without the GIL, returns their number. The words behind the first H_WORDS are the hooks' own.

    H_BEFORE, H_COUNT, H_AFTER     addresses of the hooks
    H_TASK                         what the hooks have to do, in a code of their own
    H_VALUE, H_PLACES              addresses of the object to send and the list to fill
    H_RAN                          the number of operations that have ended; 0 between calls
    H_TAG                          the tag of the messages behind the first; `count` stores it

    answer       of             operation   list        what follows
    0            before         not yet     unchanged   the operation
    0            after          has run     filled      the entry point returns ALL_DONE + H_RAN
    REFUSED      before         not run     unchanged   the caller does all of it in Python
    UNFINISHED   after          has run     unchanged   the caller reads the objects in Python
    RAISED       before, after  as H_RAN    unchanged   the entry point raises the exception set
    other        the operation  as H_RAN    unchanged   PreparingBackend.finish, then the caller

The engine's own answers never have these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

H_BEFORE, H_COUNT, H_AFTER, H_TASK, H_VALUE, H_PLACES, H_RAN, H_TAG = range(0, 64, 8)
H_WORDS = 8
REFUSED, UNFINISHED, RAISED = 64, 65, 66
ALL_DONE = 128


class Hooks(Protocol):
    """Hooks as Python sees them, and the memory on which they work, for one call at a time."""

    block: Any
    """The array of their block; None before the first `make_block`."""
    ran: int
    """The number of operations of the call that have ended, once `begin_fallback` has run."""

    @property
    def tag(self) -> int:
        """The tag of the messages behind the first, once that has ended."""

    @property
    def arrays(self) -> Mapping[int, tuple[Any, Any]]:
        """The arguments x and y of a prepared call, by task.

        For messages, all arrays and the tag of the first.
        """

    def make_block(self) -> Any:
        """Make the block and return it; may block to compile the hooks."""

    def answer_to(self, error: Exception) -> int:
        """Clean up after a hook has raised an error; return REFUSED or UNFINISHED."""

    def begin_fallback(self, answer: int | None) -> None:
        """Prepare for the caller, who goes on where the hooks have stopped; None: none has run."""


H = TypeVar("H", bound=Hooks)


class HooksPool(Protocol[H]):
    """Hooks that no call uses now."""

    def pop(self) -> H:
        """Take hooks; IndexError if there are none."""

    def append(self, hooks: H, /) -> None:
        """Give hooks back."""

    def make(self) -> H:
        """Return new hooks."""
