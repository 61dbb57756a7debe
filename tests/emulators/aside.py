"""A call on a thread of its own, which may not come back until something else has happened."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

from driving import Refused

A_WHILE = 0.2
"""Seconds after which a call counts as one that does not come back by itself."""


class Aside:
    """A call that runs beside its caller from now on."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._errors: list[Exception] = []
        self._thread = Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (Refused, AssertionError) as error:  # raised by `join`
            self._errors.append(error)

    def is_stuck(self) -> bool:
        """Say whether the call has not come back after a while."""
        self._thread.join(A_WHILE)
        return self._thread.is_alive()

    def join(self, seconds: float = 20.0) -> None:
        """Wait for the call's end; raise its error."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the call has not come back"
        for error in self._errors:
            raise error
