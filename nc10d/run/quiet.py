"""Ending on Ctrl-C as a command should: exit code 130 and nothing to read."""

from __future__ import annotations

from collections.abc import Callable

INTERRUPTED = 130
"""What a shell reports for a command that Ctrl-C ended: 128 + SIGINT."""


def quietly(main: Callable[[], int]) -> int:
    """Return main()'s exit code, or INTERRUPTED if Ctrl-C ended it.

    Only what `main` imports itself is covered, so a command's module should import little else.
    """
    try:
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED
