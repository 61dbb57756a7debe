"""Runs a test's body on ranks, which are kept from test to test."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import pytest

from nc10d.errors import DistError, UnsupportedPlatform
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.hosts.host_ranks import HostRanks
from nc10d.testing.outcomes import REMARKS, is_shown
from nc10d.testing.plugin.strict import watching
from nc10d.testing.ranks import Ranks
from nc10d.testing.simulated.explore import ExploringRanks
from nc10d.testing.simulated.faults import Fault, FaultsOfSeed
from nc10d.testing.simulated.simulated_ranks import SeededRanks, own_arrays

MOST_PROCESSES = 8
"""Most processes that are kept for later tests."""
TIMEOUT = 10.0
_MARK = {
    **dict.fromkeys(("kind", "timeout", "strict"), ""),
    **dict.fromkeys(("faults", "seeds", "orders"), "simulated"),
    "hosts": "processes",
}
"""The mark's arguments, each with the kind of ranks that has it."""


class RankSettings(NamedTuple):
    """The kind of ranks, the seconds for operations, and whether calls are watched.

    The others are for simulated ranks: a run for each of `seeds` seeds from `seed` on, with the
    faults of a plan, or a function's faults for the seed; or a run for each order, up to `orders`.
    Processes are on `hosts` hosts.
    """

    kind: str
    timeout: float
    strict: bool
    seed: int = 0
    faults: tuple[Fault, ...] | FaultsOfSeed = ()
    seeds: int = 1
    orders: int = 0
    hosts: int = 1


class RankPool:
    """The ranks of a test run, which later tests use again; each test has a new group."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, RankSettings], Ranks] = {}

    def take(self, size: int, settings: RankSettings) -> Ranks:
        """Return ranks that have just formed their default group."""
        kind, strict = settings.kind, settings.strict
        if kind == "simulated":  # a new world for each run
            return _simulated(size, settings)
        ranks = self._kept.pop((size, settings), None)
        with _sync_sends(strict):
            if ranks is None:
                self._make_room(size, kind)
                ranks = _real(size, settings)
            self._kept[size, settings] = ranks  # as the latest
            try:
                ranks.renew()
            except UnsupportedPlatform as error:
                if settings.hosts > 1:
                    pytest.skip(str(error))
                raise
        return ranks

    def _make_room(self, size: int, kind: str) -> None:
        for key in [*self._kept] if kind == "processes" else []:
            alive = sum(n for n, settings in self._kept if settings.kind == kind)
            if key[1].kind == kind and alive + size > MOST_PROCESSES:
                self._kept.pop(key).close()

    def close(self) -> None:
        """End all ranks."""
        kept, self._kept = self._kept, {}
        for ranks in kept.values():
            ranks.close()


def _simulated(size: int, settings: RankSettings) -> Ranks:
    _, timeout, strict, seed, faults, seeds, orders, _ = settings
    if orders and (faults or seeds > 1):
        pytest.fail("@pytest.mark.ranks: orders have neither seeds nor faults", pytrace=False)
    if orders:
        return ExploringRanks(size, timeout, strict, orders)
    return SeededRanks(size, range(seed, seed + seeds), timeout, faults, strict)


def _real(size: int, settings: RankSettings) -> Ranks:
    if settings.hosts > 1:
        return HostRanks(size, settings.hosts, settings.timeout)
    return Ranks(size, settings.kind, timeout=settings.timeout)  # type: ignore[arg-type]  # it checks


@contextlib.contextmanager
def _sync_sends(on: bool) -> Iterator[None]:
    """Let groups that form meanwhile have synchronous sends; a user's own setting holds."""
    name = "NC10D_SYNC_SENDS"
    before = os.environ.get(name)
    if before is None:
        os.environ[name] = str(int(on))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


class RankWorld:
    """The value of `world` outside the test's body: only the ranks have the group."""

    def __init__(self, pool: RankPool, size: int) -> None:
        self.size, self._pool = size, pool

    def settings(self, item: pytest.Item) -> RankSettings:
        """Return the settings for a test's ranks; a wrong mark fails the test."""
        mark = item.get_closest_marker("ranks")
        given = {} if mark is None else mark.kwargs
        kind = given.get("kind", item.config.option.nc10d_kind)
        for name in given:
            if name not in _MARK:
                text = f"@pytest.mark.ranks takes {', '.join(_MARK)}, not {name}"
                pytest.fail(text, pytrace=False)
            if _MARK[name] not in ("", kind):
                text = f"{name} of @pytest.mark.ranks: only for kind={_MARK[name]!r}"
                pytest.fail(text, pytrace=False)
        faults = given.get("faults", ())
        return RankSettings(
            kind,
            float(given.get("timeout", TIMEOUT)),
            bool(given.get("strict", True)),
            item.config.option.nc10d_seed,
            faults if callable(faults) else tuple(faults),
            int(given.get("seeds", 1)),
            int(given.get("orders", 0)),
            int(given.get("hosts", 1)),
        )

    def ranks(self, settings: RankSettings) -> Ranks:
        """Return ranks; blocks until they have formed a group."""
        return self._pool.take(self.size, settings)

    def run(
        self, ranks: Ranks, function: Callable[..., Any], values: Mapping[str, Any], strict: bool
    ) -> None:
        """Run a test's body on every rank."""
        body: Any = function
        if ranks.kind == "processes":
            values = {name: None if value is self else value for name, value in values.items()}
            body = BodyInFile(function)
        _check_drawn(values)
        ranks.run(call_body, [body] * self.size, [values] * self.size, [strict] * self.size)

    def __repr__(self) -> str:
        return f"{self.size} ranks"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"world.{name}: the group exists on the ranks, so only the test's body can use it; a "
            "fixture runs once, beside the ranks"
        )


def call_body(
    group: ProcessGroup, function: Callable[..., object], values: dict[str, Any], strict: bool
) -> None:
    """Call a test's body on a rank."""
    values = {name: own_arrays(value) for name, value in values.items()}
    if "world" in values:
        values = values | {"world": group}
    if not strict:
        _call(function, values)
        return
    with watching() as watch:
        try:
            _call(function, values)
        except BaseException as error:
            setattr(error, REMARKS, watch.remarks(error))
            raise
        watch.check()


def _call(function: Callable[..., Any], values: dict[str, Any]) -> None:
    if (result := function(**values)) is not None:
        raise TypeError(f"a test returns nothing, but {function.__qualname__} returned {result!r}")


def run_item(item: pytest.Function, world: RankWorld) -> None:
    """Run a test on its ranks; with hypothesis, once for each example."""
    __tracebackhide__ = True
    values = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    settings = world.settings(item)
    if settings.kind == "processes":
        _check_values({name: value for name, value in values.items() if value is not world})
    ranks = world.ranks(settings)
    handle = getattr(item.obj, "hypothesis", None)
    if handle is None:
        world.run(ranks, item.obj, values, settings.strict)
        return
    inner, own = handle.inner_test, getattr(item.obj, "__self__", None)

    @functools.wraps(inner)  # the text is the key in hypothesis' database
    def example(*arguments: object, **drawn: object) -> None:
        named = inspect.signature(inner).bind(*arguments, **drawn).arguments
        body = inner if own is None else inner.__get__(named.pop(next(iter(named))))
        try:
            world.run(ranks, body, named, settings.strict)
        except Exception as error:
            _end_in_users_line(error)
            raise

    _lift_deadline(getattr(item.obj, "__func__", item.obj))
    # As hypothesis documents for plugins that run tests their own way.
    handle.inner_test = example
    try:
        item.obj(**values)
    finally:
        handle.inner_test = inner


def _lift_deadline(test: object) -> None:
    """Let examples take any time, unless the test has settings: ranks wait for each other."""
    from hypothesis import settings
    from hypothesis.errors import InvalidArgument

    with contextlib.suppress(InvalidArgument):  # the test has its own settings
        settings(deadline=None)(test)


def _end_in_users_line(error: BaseException) -> None:
    """Cut the traceback behind the user's last line, by which hypothesis knows a bug again."""
    steps, trace = [], error.__traceback__
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    while steps and not is_shown(steps[-1].tb_frame.f_code.co_filename):
        steps.pop()
    if any(step.tb_frame.f_code.co_name == call_body.__name__ for step in steps):
        kept: TracebackType | None = None
        for step in reversed(steps):
            kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
        error.__traceback__ = kept
        if isinstance(error, DistError):  # the cause is another rank's same error
            error.__cause__ = error.__context__ = None


def _check_drawn(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if type(value).__name__ == "DataObject":
            raise TypeError(
                f"{name}=st.data() draws while the test runs, which ranks cannot do alike; draw "
                "all values by @given"
            )


class BodyInFile:
    """A test in a file; unpickled on a rank, it is the function, with pytest's assert messages."""

    def __init__(self, function: Callable[..., Any]) -> None:
        module = sys.modules[function.__module__]
        names = function.__qualname__.split(".")
        if "<locals>" in names:
            raise TypeError(f"{function.__qualname__}: ranks as processes need a test of a module")
        assert module.__file__ is not None, "pytest has read it from a file"
        self._where = function.__module__, module.__file__, names

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, self._where


def _load(module: str, path: str, names: list[str]) -> object:
    """Return the test with these names; in a class, as a method on a new instance."""
    found: Any = sys.modules.get(module) or _import(module, path)
    for name in names:
        owner, found = found, getattr(found, name)
        if isinstance(owner, type):
            found = getattr(owner(), name)
    handle = getattr(found, "hypothesis", None)
    return found if handle is None else handle.inner_test


def _check_values(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # noqa: BLE001  (a value's own code may raise anything)
            kind = type(value).__name__
            text = f"{name} is a {kind}, which cannot be sent to ranks that are processes"
            pytest.fail(f"{text}: {error}; use kind='threads'", pytrace=False)


def _import(name: str, path: str) -> ModuleType:
    """Import a test's file as pytest does, with pytest's assert messages."""
    import ast

    from _pytest.assertion.rewrite import rewrite_asserts

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} is a file of Python"
    module = importlib.util.module_from_spec(spec)
    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path)
    sys.modules[name] = module
    exec(compile(tree, path, "exec"), module.__dict__)
    return module
