"""Run test files of torch with nc10d in gloo's place, beside gloo, and count both.

    python tools/torch_files.py ~/pytorch/test/distributed/algorithms/test_join.py ...
    python tools/torch_files.py --backend nc10d FILE    # one of them only
    python tools/torch_files.py -k comm_hook FILE       # tests with these letters in their names

torch's wheel has no test files besides those that tools/torch_suite.py runs, so FILEs are those of
a checkout of torch, at the tag of the installed version. Each file runs in a process of its own.
Where a test asks torch for gloo, a group of nc10d is made, which torch.distributed still calls
gloo: tests see no difference. Ranks are forked from the process that has read the file. A table of
counts is printed, and the tests that pass with gloo alone; the exit code is their number.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_suite import Outcome, load_nc10d

GLOO, OURS = "gloo", "nc10d"
Outcomes = dict[str, str]


def fork_ranks() -> None:
    """Fork processes where tests spawn them: children keep the replacement, and import nothing."""
    import torch.multiprocessing

    theirs = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return theirs("fork" if method == "spawn" else method)

    for module in (multiprocessing, torch.multiprocessing):
        vars(module)["get_context"] = get_context
    # Tests whose ranks outlive a test ask for spawning only where no method is set.
    multiprocessing.set_start_method("fork", force=True)


def run_file(path: Path, backend: str, words: Sequence[str], limit: int) -> Outcomes:
    """Run a file's tests in this process; return the outcome of each, by class and name."""
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(limit)
    sys.path[:0] = [str(path.parent), *(str(x) for x in path.parents if x.name == "test")]
    import torch

    torch.set_num_threads(1)
    fork_ranks()
    if backend == OURS:
        load_nc10d()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    chosen = [
        test
        for test in _tests(unittest.defaultTestLoader.loadTestsFromModule(module))
        if not words or any(word in test.id() for word in words)
    ]
    outcome = Outcome()
    unittest.TestSuite(chosen).run(outcome)
    return {line["test"]: line["outcome"] for line in outcome.lines}


def _tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for part in suite:
        if isinstance(part, unittest.TestSuite):
            yield from _tests(part)
        else:
            yield part


def run_apart(path: Path, backend: str, given: argparse.Namespace) -> Outcomes | None:
    """Run a file in a process of its own; None if it did not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "outcomes")
        command = [sys.executable, __file__, "--into", str(answer), "--backend", backend]
        command += ["--limit", str(given.limit), *(f"-k={word}" for word in given.words), str(path)]
        with Path(given.logs, f"{path.stem}.{backend}.log").open("w") as log:
            # No check: without an answer it has failed.
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        return dict(json.loads(answer.read_text())) if answer.exists() else None


def cell(outcomes: Outcomes | None) -> str:
    """Return the counts of a file as a table's cell."""
    if outcomes is None:
        return "did not run"
    found = [*outcomes.values()]
    passed = found.count("passed")
    return f"{passed} of {passed + found.count('failed')}"


def main() -> int:
    """Run the files with each backend, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--backend", choices=[GLOO, OURS], help="one of them only")
    parser.add_argument("-k", dest="words", action="append", default=[], help="letters in names")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a test")
    parser.add_argument("--logs", default=tempfile.gettempdir(), help="where outputs go")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.into:
        found = run_file(given.files[0].resolve(), given.backend, given.words, given.limit)
        given.into.write_text(json.dumps(found))
        return 0
    Path(given.logs).mkdir(parents=True, exist_ok=True)
    backends = [given.backend] if given.backend else [GLOO, OURS]
    print(f"| file | {' | '.join(backends)} |", "|---" * (1 + len(backends)) + "|", sep="\n")
    only: list[str] = []
    for path in given.files:
        by_backend = {backend: run_apart(path, backend, given) for backend in backends}
        print(f"| {path.name} | {' | '.join(map(cell, by_backend.values()))} |", flush=True)
        theirs, ours = by_backend.get(GLOO), by_backend.get(OURS)
        for name in [x for x, how in (theirs or {}).items() if how == "passed"]:
            if OURS in backends and (ours or {}).get(name) != "passed":
                only.append(f"{path.name}: {name}")
    if only:
        print("", "With gloo alone pass:", *only, sep="\n")
    return len(only)


if __name__ == "__main__":
    sys.exit(main())
