"""The pytest plugin: bodies of tests run on ranks, and what a failure shows."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import nc10d.testing.plugin.failure_text
import nc10d.testing.plugin.items  # noqa: F401  (see `imported`)
from nc10d.kernels import cache_dir
from nc10d.testing import run_ranks

pytest_plugins = ["pytester"]
CACHE = next(iter(cache_dir.roots()))
"""Where this user's compiled code is; pytester gives its tests another home."""
Run = Callable[..., pytest.RunResult]
HEAD = """
import unittest
import numpy as np
import pytest
import nc10d as dist
from hypothesis import given, strategies as st
from nc10d.testing import assert_partition, assert_reduced, assert_replicated
"""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import everything now: pytester forgets what its runs import, which NumPy does not bear."""
    run_ranks(lambda group: group.barrier(), 1)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs pytest on a module with a body after HEAD."""
    monkeypatch.setenv("NC10D_CACHE_DIR", str(CACHE))

    def run_body(body: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=HEAD + body)
        common = ("-p", "pytest_nc10d", "-p", "no:cacheprovider", "-p", "no:xdist")
        return pytester.runpytest_inprocess(*common, *options)

    return run_body


def text_of(result: pytest.RunResult) -> str:
    """Return the failures without pytest's frame, and without its line breaks in sentences."""
    lines = result.outlines
    first = next(i for i, line in enumerate(lines) if "= FAILURES =" in line)
    last = next(i for i, line in enumerate(lines) if "short test summary" in line)
    return "\n".join(lines[first + 2 : last]).replace("\n      ", " ")


RIGHT = """
@pytest.mark.ranks(3)
def test_sum(world):
    x = np.full(4, world.rank + 1.0)
    dist.all_reduce(x)
    assert x[0] == 6 and world.size == 3

@pytest.mark.ranks
def test_without_the_fixture():
    assert dist.get_world_size() in (1, 2)

def test_without_the_mark(world, tmp_path):
    assert world.size in (1, 2) and tmp_path.exists()

class TestMethods:
    @pytest.mark.ranks(1, 2)
    def test_sizes(self, world):
        dist.barrier()

@pytest.mark.ranks(2)
@given(n=st.integers(0, 9))
def test_drawn(world, n):
    x = np.full(n, 1.0)
    dist.all_reduce(x)
    assert (x == 2).all()

@pytest.mark.ranks(2)
def test_skipped(world):
    pytest.skip("not here")
"""


def test_bodies_run_on_every_rank(run: Run) -> None:
    result = run(RIGHT, "--nc10d-ranks", "1,2")
    result.assert_outcomes(passed=8, skipped=1)


WRONG_VALUE = """
def check(x, before):
    assert_reduced(x, before)

@pytest.mark.ranks(3)
def test_mean(world):
    x = np.full(4, world.rank + 1.0)
    before = x.copy()
    dist.all_reduce(x)
    x[2] += world.rank == 1
    check(x, before)
"""


def test_a_mismatch_names_rank_index_and_values_in_25_lines(run: Run) -> None:
    result = run(WRONG_VALUE)
    assert len(result.outlines) <= 25, result.outlines
    text = text_of(result)
    assert "rank 1 holds 7.0 at [2], must be 6.0 (1 of 4 elements)" in text
    assert "Contributions there: rank 0: 1.0, rank 1: 2.0, rank 2: 3.0" in text
    assert "ranks 0, 1, 2: AssertionError" in text
    assert re.findall(r"(test_it.py:\d+) in (\w+)", text) == [
        ("test_it.py:17", "test_mean"),
        ("test_it.py:9", "check"),
    ], "the user's frames only"


ONE_RAISES = """
def body(world):
    if world.rank == 1:
        assert world.size == 5
    dist.barrier()

@pytest.mark.ranks(3)
def test_threads(world):
    body(world)

class TestProcesses:
    @pytest.mark.ranks(3, kind="processes")
    def test_method(self, world, tmp_path):
        assert tmp_path.exists()
        body(world)
"""


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_failure_tells_what_each_rank_was_doing(run: Run, kind: str) -> None:
    text = text_of(run(ONE_RAISES, "-k", kind))
    assert f"3 ranks as {kind}" in text
    assert "rank 1: AssertionError" in text
    assert re.search(r"E +assert 3 == 5", text), "pytest's own words"
    assert re.search(r"ranks 0, 2: were waiting at test_it.py:\d+ in body: dist.barrier\(\)", text)


SAME_ON_ALL = """
@pytest.mark.ranks(3)
def test_same(world):
    assert np.zeros(3).any()

@pytest.mark.ranks(2)
def test_dropped(world):
    works = [dist.all_reduce(x, async_op=True) for x in np.ones((3, 2))]
    works[0].wait()
    works[2].wait()

@pytest.mark.ranks(2, kind="simulated")
def test_close(world):
    np.testing.assert_allclose(np.ones(1), 2.0)
"""


def test_an_error_of_all_ranks_is_shown_once_and_a_dropped_call_by_its_place(run: Run) -> None:
    result = run(SAME_ON_ALL)
    text = text_of(result)
    assert text.count("ranks 0, 1, 2: AssertionError") == 1
    assert text.count("assert np.False_") == 1
    assert re.search(r"all_reduce at test_it.py:\d+ \(call 2 of 3 there\) was never", text)
    assert text.count("works = [dist.all_reduce") == 1, "a comprehension is not another line"
    assert re.search(r"test_close.*: Not equal", "\n".join(result.outlines)), "of the summary"


ONE_RETURNS = """
@pytest.mark.ranks(2)
def test_early(world):
    if world.rank == 0:
        return
    dist.barrier()
"""


def test_a_rank_that_has_returned_is_shown_with_its_line(run: Run) -> None:
    text = text_of(run(ONE_RETURNS))
    assert re.search(r"rank 0 has returned\s+from its function at test_it.py:11 or 12", text)
    assert "rank 0: returned at test_it.py:11 or 12 in test_early" in text


def test_an_example_is_shrunk_and_the_next_test_has_a_new_group(run: Run) -> None:
    circle = """
@pytest.mark.ranks(2)
@given(n=st.integers(0, 100))
def test_circle(world, n):
    if n > 5:
        world.recv(np.empty(1), 1 - world.rank)
"""
    result = run(circle + RIGHT)
    result.assert_outcomes(passed=6, failed=1, skipped=1)
    text = text_of(result)
    assert "wait for each other in a circle" in text
    assert "n=6," in text


REFUSED = {
    "def test_kind(world): pass": "strict, faults, seeds, orders, hosts, not colour",
    "@pytest.mark.ranks(0)\ndef test_it(world): pass": "numbers of ranks, each at least 1, not 0",
    "class TestCase(unittest.TestCase):\n    @pytest.mark.ranks(2)\n    def test_it(self): pass": (
        "works on functions and on methods of plain classes"
    ),
    "@pytest.fixture\ndef half(world): return world.rank / 2\ndef test_it(half): pass": (
        "a fixture runs once, beside the ranks"
    ),
    "def test_it(world): return 1": "a test returns nothing, but test_it returned 1",
}


@pytest.mark.parametrize("body", REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_use_is_explained(run: Run, body: str) -> None:
    mark = "@pytest.mark.ranks(2, colour='red')\n" if "test_kind" in body else ""
    assert REFUSED[body] in "\n".join(run(mark + body).outlines)


SIMULATED = """
@pytest.mark.ranks(3, kind="simulated", orders=50)
def test_orders(world):
    if world.rank == 0:
        assert [world.recv(np.zeros(1)) for _ in range(2)] == [1, 2]
    else:
        world.send(np.zeros(1), 0)

@pytest.mark.ranks(3, kind="simulated", seeds=50)
def test_seeds(world):
    if world.rank == 0:
        assert [world.recv(np.zeros(1)) for _ in range(2)] == [1, 2]
    else:
        world.send(np.zeros(1), 0)

def late(seed):
    return draw_faults(3, 60.0, seed, [Kill])

@pytest.mark.ranks(3, kind="simulated", seeds=50, faults=late)
def test_faults(world):
    for _ in range(70):
        time.sleep(1.0)
        dist.barrier()

@pytest.mark.ranks(2, kind="simulated", seeds=3, orders=2)
def test_both(world):
    pass

@pytest.mark.ranks(2, seeds=3)
def test_threads(world):
    pass
"""


def test_simulated_ranks_run_in_many_orders_and_with_many_seeds(run: Run) -> None:
    head = "import time\nfrom nc10d.testing import Kill, draw_faults\n"
    text = text_of(run(head + SIMULATED))
    assert "3 ranks as simulated tasks, order 2" in text
    assert "order 2: choices=[1]" in text
    assert re.search(r"3 ranks as simulated tasks, seed \d+\n\nrank 0: AssertionError", text)
    assert re.search(r"ranks? \d.*: PeerLost", text)
    assert "orders have neither seeds nor faults" in text
    assert "seeds of @pytest.mark.ranks: only for kind='simulated'" in text


def test_a_value_that_cannot_be_sent_is_named(run: Run) -> None:
    body = "@pytest.mark.ranks(2, kind='processes')\ndef test_it(world, capsys): pass"
    text = "\n".join(run(body).outlines)
    assert "capsys is a CaptureFixture, which cannot be sent to ranks that are processes" in text


def test_a_run_without_ranks_imports_no_nc10d(pytester: pytest.Pytester) -> None:
    body = "assert not [name for name in sys.modules if name.startswith('nc10d')]"
    pytester.makeini("[pytest]")
    pytester.makepyfile(test_it=f"import sys\ndef test_it(): {body}")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "pytest_nc10d", "test_it.py"]
    subprocess.run(command, cwd=pytester.path, env=environment, check=True)
