"""The pytest plugin of nc10d: tests whose body runs on every rank of a group.

    @pytest.mark.ranks(3)
    def test_sum(world):                 # runs on each of 3 ranks
        x = np.full(4, world.rank + 1.0)
        dist.all_reduce(x)
        assert x[0] == 6

This module imports no part of nc10d before a test needs ranks, so that other test runs pay nothing
for it. It is not inside the package for the same reason: `import nc10d.testing` imports nc10d.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nc10d.testing.plugin.items import RankPool, RankWorld

KINDS = ("threads", "processes", "simulated")
MARK = (
    "ranks(*sizes, kind=..., timeout=10.0, strict=True, seeds=1, faults=(), orders=0, hosts=1): "
    "run the body of the test on each rank of a group, once for each of `sizes`; without sizes, as "
    "--nc10d-ranks says. `timeout`, in seconds, is that of every operation. `strict` finds Works "
    "without a wait and arrays that are used before it, and lets sends wait for their receivers. "
    "Simulated ranks have a run for each of `seeds` seeds, with `faults`; or a run for each order, "
    "up to `orders`. Ranks that are processes can be on `hosts` hosts (network namespaces)."
)
_pool: pytest.StashKey[RankPool] = pytest.StashKey()


def _sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers of ranks such as 2,3,4, got {text!r}")
    return [int(part) for part in parts]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("nc10d", "tests on several ranks (nc10d)")
    group.addoption(
        "--nc10d-ranks",
        type=_sizes,
        default=[2],
        metavar="N,...",
        help="numbers of ranks for tests that name none by @pytest.mark.ranks (default: 2)",
    )
    group.addoption(
        "--nc10d-kind",
        choices=KINDS,
        default="threads",
        help="the kind of ranks in tests that do not name one (default: threads)",
    )
    group.addoption(
        "--nc10d-seed",
        type=int,
        default=0,
        metavar="N",
        help="decides order and delays of simulated ranks (default: 0)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> None:
    """Let a test with the mark use the fixture, even if its body does not name it."""
    marks = getattr(obj, "pytestmark", None)
    own = isinstance(marks, list) and any(mark.name == "ranks" for mark in marks)
    if (own or collector.get_closest_marker("ranks")) and collector.istestfunction(obj, name):
        pytest.mark.usefixtures("world")(obj)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test of ranks its numbers of ranks."""
    if "world" not in metafunc.fixturenames or not _is_ours(metafunc):
        return
    mark = metafunc.definition.get_closest_marker("ranks")
    sizes = [*mark.args] if mark is not None and mark.args else metafunc.config.option.nc10d_ranks
    wrong = [size for size in sizes if type(size) is not int or size < 1]
    if wrong:
        text = f"@pytest.mark.ranks takes numbers of ranks, each at least 1, not {wrong[0]!r}"
        pytest.fail(text, pytrace=False)
    names = [f"{size}ranks" for size in sizes]
    # The scope of a function: tests stay in the order of their files.
    metafunc.parametrize("world", sizes, indirect=True, ids=names, scope="function")


def _is_ours(metafunc: pytest.Metafunc) -> bool:
    """Return whether the test's `world` is this plugin's fixture, not one of the project's own."""
    found = metafunc._arg2fixturedefs.get("world", ())
    return bool(found) and found[-1].func.__module__ == __name__


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> RankWorld:
    """The group of the rank that runs the test's body: an nc10d.ProcessGroup."""
    from nc10d.testing.plugin.items import RankPool, RankWorld

    return RankWorld(request.config.stash.setdefault(_pool, RankPool()), request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test of ranks on its ranks."""
    __tracebackhide__ = True
    given: Any = pyfuncitem.funcargs.get("world")
    if type(given).__name__ != "RankWorld":  # its module is imported only with the first of them
        return None
    from nc10d.testing.plugin.items import run_item

    run_item(pyfuncitem, given)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a mark that would have no effect."""
    if item.get_closest_marker("ranks") and "world" not in getattr(item, "fixturenames", ()):
        pytest.fail(
            "@pytest.mark.ranks works on functions and on methods of plain classes, not in a "
            "unittest.TestCase or a doctest",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the failure of a run of ranks by rank."""
    report = yield
    error: Any = None if call.excinfo is None else call.excinfo.value
    if getattr(error, "_nc10d_report", None) is not None and report.failed:
        from nc10d.testing.plugin.failure_text import failure

        report.longrepr = failure(error, item) or report.longrepr
    return report


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End all ranks after the last test, before a plugin for coverage collects its files."""
    try:
        return (yield)
    finally:
        pool = session.config.stash.get(_pool, None)
        if pool is not None:
            pool.close()
