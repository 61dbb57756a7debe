"""Run torch's own DistributedTest, from the installed torch, with another backend in gloo's place.

    python tools/torch_suite.py --ranks 4                  # nc10d
    python tools/torch_suite.py --ranks 4 --backend gloo   # gloo's own count
    python tools/torch_suite.py --ranks 2 --ddp            # nc10d's DistributedDataParallel, too
    python tools/torch_suite.py --ranks 2 all_reduce       # tests with these letters in their names
    python tools/torch_suite.py --ranks 4 --more           # and tests that only MPI has to pass

The tests run as they stand and name gloo: nc10d.torch.replace_gloo() makes their groups nc10d's.
Ranks are forked from this process, which has imported torch but computed nothing: a test takes a
second instead of the import of N torches.
A test that takes longer than --limit seconds fails with the stacks of its ranks, and ends. The exit
code is the number of tests that failed, or 1 if fewer passed than --least.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
import unittest
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Outcome(unittest.TestResult):
    """A result that prints a line for each test as it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        """Note the time."""
        super().startTest(test)
        self._began = time.monotonic()

    def _say(self, test: unittest.TestCase, how: str, why: str = "") -> None:
        spent = time.monotonic() - self._began
        name = test.id().rpartition(".")[2]
        self.lines.append({"test": name, "outcome": how, "why": why, "seconds": round(spent, 1)})
        print(f"{how:7} {spent:6.1f} s  {name}{': ' * bool(why)}{why.strip()}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        """Count a test that passed."""
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Count a test that torch skips."""
        super().addSkip(test, reason)
        self._say(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """Count a test whose ranks ended otherwise than it expects."""
        super().addFailure(test, err)
        self._say(test, "failed", self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        """Count a test whose ranks raised an error, or did not end."""
        super().addError(test, err)
        self._say(test, "failed", self.errors[-1][1])


def suite_class(backend: str, ranks: int, own_ddp: bool) -> type[unittest.TestCase]:
    """Return torch's test class with `backend` in gloo's place."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(ranks))
    if backend == "nc10d":
        load_nc10d()
    from torch.testing._internal.distributed import distributed_test as theirs

    if own_ddp:
        replace_ddp(theirs)

    def start(self: Any) -> None:
        import torch.multiprocessing as multiprocessing

        theirs.TestDistBackend.setUp(self)
        self._start_processes(multiprocessing.get_context("fork").Process)

    bases = (theirs.TestDistBackend, theirs.DistributedTest._DistTestBase)
    return type("TestInGloosPlace", bases, {"setUp": start, "__module__": __name__})


def load_nc10d() -> None:
    """Put nc10d in gloo's place, loaded once before ranks are forked."""
    import nc10d.backend.cpu.backend
    import nc10d.torch.backend.creation

    assert nc10d.backend.cpu.backend
    nc10d.torch.replace_gloo()


def replace_ddp(tests: Any) -> None:
    """Put nc10d's DistributedDataParallel, on the groups below torch's, in the place of torch's.

    It is pickled with nc10d's default group, so both libraries have the same default group.
    """
    import torch

    import nc10d.torch
    from nc10d.group.world import close_at_exit, current_world
    from nc10d.torch.backend.torch_functions import gloos_fields

    class DistributedDataParallel(nc10d.torch.DistributedDataParallel):
        def __init__(self, module: Any, *arguments: Any, **options: Any) -> None:
            group = options.pop("process_group", None) or torch.distributed.group.WORLD
            group = nc10d.torch.group_of(group)
            super().__init__(module, *arguments, **options | {"process_group": group})

        def _get_ddp_logging_data(self) -> Any:  # the tests want gloo's fields for gloo's name
            return super()._get_ddp_logging_data() | gloos_fields()

    # Pickle finds the class by its name.
    DistributedDataParallel.__qualname__ = DistributedDataParallel.__name__
    globals()[DistributedDataParallel.__name__] = DistributedDataParallel
    theirs = torch.distributed.init_process_group

    def init_both(backend: str | None = None, **options: Any) -> None:
        theirs(backend, **options)
        world = current_world()
        world.default = world.keep(nc10d.torch.group_of())
        close_at_exit()

    torch.distributed.init_process_group = init_both
    tests.DistributedDataParallel = DistributedDataParallel
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel


def run_more(cases: type[unittest.TestCase], ranks: int) -> None:
    """Let tests run that torch keeps for MPI: all_to_all, and groups inside a world of 4."""
    for name in unittest.TestLoader().getTestCaseNames(cases):
        test = getattr(cases, name)
        if getattr(test, "__unittest_skip_why__", "").startswith("Only MPI supports"):
            test.__unittest_skip__ = False
    if ranks >= 4:
        os.environ["BACKEND"] = "mpi"  # skip_if_small_worldsize asks the environment at run time


def skip_for_devices(cases: type[unittest.TestCase]) -> None:
    """Skip tests for GPUs before ranks are started, which would find none."""
    for name in unittest.TestLoader().getTestCaseNames(cases):
        outer = getattr(getattr(cases, name), "__code__", None)
        kind = outer.co_qualname.partition(".")[0] if outer else ""
        allowed = inspect.getclosurevars(getattr(cases, name)).nonlocals.get("allow_cpu", False)
        if kind in ("skip_if_no_gpu", "skip_if_lt_x_gpu") and not allowed:
            setattr(cases, name, unittest.skip("a test for GPUs")(getattr(cases, name)))


def load(cases: type[unittest.TestCase], words: Sequence[str]) -> unittest.TestSuite:
    """Return the tests whose names hold one of `words`; without words, all."""
    names = unittest.TestLoader().getTestCaseNames(cases)
    chosen = [name for name in names if not words or any(word in name for word in words)]
    return unittest.TestSuite(map(cases, chosen))


def main() -> int:
    """Run the tests and print their counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="letters in the names of tests")
    parser.add_argument("--backend", default="nc10d")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ddp", action="store_true", help="with nc10d's DDP in place of torch's")
    parser.add_argument("--more", action="store_true", help="also what torch keeps for MPI")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a test")
    parser.add_argument("--least", type=int, default=0, help="how many tests have to pass")
    parser.add_argument("--json", type=Path, help="where to write the outcome of every test")
    given = parser.parse_args()
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(given.limit)
    outcome = Outcome()
    began = time.monotonic()
    cases = suite_class(given.backend, given.ranks, given.ddp)
    import torch

    if not torch.cuda.is_available():
        skip_for_devices(cases)
    if given.more:
        run_more(cases, given.ranks)
    load(cases, given.words).run(outcome)
    count = Counter(line["outcome"] for line in outcome.lines)
    if given.json:
        given.json.write_text(json.dumps(outcome.lines, indent=1))
    print(
        f"torch {torch.__version__}, {given.backend}{', DDP of nc10d' * given.ddp}, "
        f"{given.ranks} ranks: {count['passed']} of {count['passed'] + count['failed']} passed, "
        f"{count['skipped']} skipped, {time.monotonic() - began:.0f} s"
    )
    return count["failed"] or int(count["passed"] < given.least)


if __name__ == "__main__":
    sys.exit(main())
