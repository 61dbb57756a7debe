"""Shared test settings."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from nc10d.testing.ranks import Ranks

# A shared machine may be slow at anything, so Hypothesis must not check the time.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

for folder in ("backend", "backend/cpu", "emulators", "store", "torch"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# Tests start scripts that import benchmarks and simulation, which are not installed.
ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))

# Kernel copies start at the same sizes on every machine.
os.environ.setdefault("NC10D_KERNEL_COPY_FROM", f"{4 << 20},{1 << 20}")

# A shell's background job ignores Ctrl-C, and its children inherit that; tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[..., Ranks]]:
    """Return ranks by size and kind, which the tests of a module share."""
    from nc10d.testing.ranks import Ranks

    with contextlib.ExitStack() as stack:
        yield functools.cache(
            lambda size, kind="threads": stack.enter_context(Ranks(size, kind, timeout=20.0))
        )


@pytest.fixture(params=["threads", "processes"])
def pair(ranks_of: Callable[..., Ranks], request: pytest.FixtureRequest) -> Ranks:
    """Return two ranks in a new group; a module starts each kind once."""
    ranks = ranks_of(2, request.param)
    ranks.renew()
    return ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test whose name holds an address: xdist's workers would collect different tests."""
    if named := [item.nodeid for item in items if re.search(r"0x[0-9a-f]{8}", item.nodeid)]:
        raise pytest.UsageError(
            f"a test's id contains an address, which differs between workers: {named[:3]}"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the ten slowest files, and their seconds, after a run of more than ten files."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 10:
        terminalreporter.section("slowest files")
        for file, duration in seconds.most_common(10):
            terminalreporter.write_line(f"{duration:6.1f} s  {file}")
