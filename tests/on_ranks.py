"""A mark that runs a test's body on ranks without strict mode."""

from __future__ import annotations

from typing import Any

import pytest


def on_ranks(*sizes: int, timeout: float = 30.0, **options: Any) -> pytest.MarkDecorator:
    """Run the body on every rank of a group, once for each size in `sizes`.

    Strict mode would watch the arrays, so that no call is prepared, and would refuse the Works that
    these tests drop.
    """
    return pytest.mark.ranks(*sizes, timeout=timeout, strict=False, **options)
