"""Ranks that the tests of a module share."""

import pytest

from nc10d.testing import Ranks


@pytest.fixture(scope="module")
def ranks(request):
    """Yield the ranks that RANKS of the module describes; its `start`, if any, runs there first."""
    module = request.module
    with Ranks(**module.RANKS) as started:
        if hasattr(module, "start"):
            started.run(module.start)
        yield started
