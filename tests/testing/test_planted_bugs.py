"""Ten mistakes in a tutorial's programs are found by the programs' own tests, and explained."""

import re
from collections.abc import Callable

import pytest

import nc10d.testing.asserts
import nc10d.testing.plugin.failure_text
import nc10d.testing.plugin.items  # noqa: F401  (see `imported`)
from nc10d.kernels import cache_dir
from nc10d.testing import run_ranks
from testing.tutorial import MISTAKES, PROGRAMS

pytest_plugins = ["pytester"]
CACHE = next(iter(cache_dir.roots()))
Run = Callable[..., pytest.RunResult]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import everything now: pytester forgets what its runs import, which NumPy does not bear."""
    run_ranks(lambda group: group.barrier(), 1)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NC10D_CACHE_DIR", str(CACHE))

    def run_source(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=source)
        common = ("-p", "pytest_nc10d", "-p", "no:cacheprovider", "-p", "no:xdist")
        return pytester.runpytest_inprocess(*common, *options)

    return run_source


def test_the_programs_are_right(run: Run) -> None:
    run(PROGRAMS).assert_outcomes(passed=6)


@pytest.mark.parametrize("kind", ["threads", "simulated"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_explained(run: Run, name: str, kind: str) -> None:
    mistake = MISTAKES[name]
    assert PROGRAMS.count(mistake.right) == 1
    source = PROGRAMS.replace(mistake.right, mistake.wrong)
    result = run(source, "-k", f"test_{mistake.test}", "--nc10d-kind", kind)
    result.assert_outcomes(failed=1, deselected=5)
    text = re.sub(r"\s+", " ", "\n".join(result.outlines))
    missing = [words for words in mistake.words if words not in text]
    assert not missing, text
    assert "timed out" not in text, "a mistake is found by itself, at once"
