"""How a group and the CPU engine pass prepared calls to each other; other backends have none.

A call that has passed all checks once is kept by kind of operation and `extra` (see
`nc10d.ops.facts.Parts`). The next such call runs without checks: the group finds the call in
`latest` and runs it, and asks the backend only where the call does not end at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from nc10d.ops import Op
from nc10d.work import Work

Arguments = Any
"""An array, a tuple of arrays, or None."""
Words = npt.NDArray[np.int64]
"""Memory that compiled code reads and writes, as a table of int64."""
W = TypeVar("W")
"""The type of a backend's waiter."""
W_contra = TypeVar("W_contra", contravariant=True)


class PreparedCall(Protocol[W_contra]):
    """An operation that has passed all checks, ready to run again.

    run(words, x, y) returns 0 once the call has ended. Any other answer goes to
    PreparingBackend.finish, and so does 0 while operations are `in_flight` on the same channel.
    x and y are as in ops.facts.Parts. `run` itself checks the arrays, which may be any objects; the
    caller has checked that a tag is an int in its range.
    """

    run: Callable[[Any, Any, Any], int]
    run_hooked: Callable[[Any, Any, Any, Any, int, Any, Any], int]
    """Does as `run`, between two hooks: run_hooked(words, x, y, block, task, value, places).

    The hooks, their arguments and answers are those of nc10d.kernels.hooks. For messages, x is a
    tuple of arrays."""

    @property
    def words(self) -> Words:
        """The call's description for compiled code, which `run` takes."""

    @property
    def in_flight(self) -> Collection[int]:
        """The addresses of the operations of the channel that have begun and have not ended."""

    def start(
        self,
        waiter: W_contra,
        x: Arguments,
        y: Arguments | int,
        timeout: float,
        waits: bool = False,
        originals: tuple[Arguments, Arguments] | None = None,
    ) -> Work | None:
        """Start the call and return its Work; None if it does not fit now: nothing has happened.

        `waiter` is the PreparingBackend's. This thread `waits` for the Work next, or does not. x
        and y may be lent views of `originals`, the caller's arrays.
        """


class PreparingBackend(Protocol[W]):
    """The ability to prepare calls, so that the next such call skips all checks."""

    waiter: W
    """The waits of the calls' Works."""

    @property
    def latest(self) -> Mapping[type[Op], Mapping[Any, PreparedCall[W]]]:
        """The call prepared or found last, by operation kind and `extra` (see Parts)."""

    @property
    def hooked(self) -> Mapping[tuple[type[Op], Any], PreparedCall[W]]:
        """The calls that `find_hooked` has found, by kind of operation and `extra`."""

    def find_hooked(
        self, kind: type[Op], extra: object, x: Arguments, y: Arguments
    ) -> PreparedCall[W] | None:
        """Return the prepared call for operations between hooks, and add it to `hooked`.

        None if there is none yet. For messages, x is a tuple with all arrays, which have the same
        size. May block to compile.
        """

    def finish(
        self, prepared: Any, answer: int, x: Arguments, y: Arguments, timeout: float
    ) -> bool:
        """Complete a call after `prepared.run` has returned `answer`; may block.

        False: nothing has happened, and the operation has to be launched.
        """

    def abandon(self, prepared: Any, x: Arguments, y: Arguments) -> None:
        """Leave a call in the middle: an exception (Ctrl-C) came out of `run` or `finish`."""

    def start_messages(self, ops: Sequence[Op], timeout: float) -> list[Work] | None:
        """Submit messages, sends first, if all are prepared; None: nothing has happened."""

    def exchange(
        self, dst: int, x: Arguments, tag: int, src: int, y: Arguments, take: int, timeout: float
    ) -> bool:
        """Send x to `dst` with `tag` while receiving y from `src` with the tag `take`; blocks.

        False: they are not prepared, and nothing has happened.
        """


Preparing = PreparingBackend[Any]
"""The ability as a group sees it, whatever the type of the waiter."""
