"""Drawn programs: nc10d, torch over gloo and MPICH compute what the oracle says."""

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from backend.mpi.mpi_launchers import MPICH
from hypothesis import find, given, settings

from nc10d.testing import Ranks, strategies
from nc10d.testing.programs.draw import random_program
from nc10d.testing.programs.mixed_program import MixedProgram, MixedStep, complaints
from testing.other_libraries import run_nc10d

SIZE = 3
WORKER = Path(__file__).with_name("other_libraries.py")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE, timeout=20.0) as three:
        yield three


def played(group: Any, program: MixedProgram) -> list[Any]:
    return program.run(group.rank)


@settings(max_examples=60)
@given(program=strategies.mixed_programs(SIZE))
def test_a_drawn_program_gives_the_oracles_results(ranks: Ranks, program: MixedProgram) -> None:
    assert complaints(program, dict(enumerate(ranks.run(played, [program] * SIZE)))) == []


def test_a_program_is_code_that_runs_by_itself(tmp_path: Path) -> None:
    program = MixedProgram(
        2,
        ((0, 1),),
        (MixedStep("all_reduce", block=True), MixedStep("message", peer=1, open_for=1)),
    )
    text = f"{program}\nfrom nc10d.testing import run_ranks\n"
    text += "print(run_ranks(lambda group: program(int(group.rank)), 2))\n"
    (tmp_path / "program.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("[[array([3]"), done.stdout
    assert eval(repr(program).partition("\n")[0]) == program


def test_a_program_shrinks_to_the_step_that_matters() -> None:
    def bad(program: MixedProgram) -> bool:
        return any(step.call == "reduce" and step.op == "MAX" for step in program.steps)

    found = find(strategies.mixed_programs(SIZE), bad, random=random.Random(0))
    assert found.groups == ()
    assert found.steps[-1] == MixedStep("reduce", op="MAX")
    assert len(found.steps) <= 2


def test_a_wrong_result_is_named() -> None:
    program = MixedProgram(2, (), (MixedStep("all_reduce"), MixedStep("gather", count=2, root=1)))
    right: dict[int, Any] = dict(enumerate(program.expected()))
    assert complaints(program, right) == []
    right[0][0] = right[0][0] + 1
    assert complaints(program, right) == ["rank 0, y0 (all_reduce): 4 at [0], must be 3"]


# -- the same programs on nc10d and on other libraries -----------------------------------------


def on_nc10d(folder: Path) -> None:
    with Ranks(SIZE, timeout=1800.0) as ranks:
        ranks.run(run_nc10d, [folder] * SIZE)


def on_torch(folder: Path) -> None:
    commands = [[sys.executable, str(WORKER), "torch", str(r), str(folder)] for r in range(SIZE)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in processes] == [0] * SIZE


def on_mpich(folder: Path) -> None:
    command = [*MPICH.command, sys.executable, str(WORKER), "mpi", str(folder)]
    words = [word.format(size=SIZE) for word in command]
    environment = os.environ | MPICH.environment
    subprocess.run(words, check=True, env=environment)


def differences(programs: Sequence[MixedProgram], answers: Sequence[Sequence[Any]]) -> list[str]:
    """Return a text for each program whose results are not the oracle's; answers by rank."""
    found = []
    for number, program in enumerate(programs):
        own = [answer[number] for answer in answers]
        errors = {answer for answer in own if isinstance(answer, str)}
        texts = sorted(errors) or complaints(program, dict(enumerate(own)))
        if texts:
            found.append(f"program {number}: {'; '.join(texts[:3])}\n{program}")
    return found


COUNTS = [500, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("play", [on_nc10d, on_torch, on_mpich])
def test_all_libraries_give_the_oracles_results(play: Any, count: int, tmp_path: Path) -> None:
    programs = [random_program(SIZE, seed) for seed in range(count)]
    (tmp_path / "programs").write_bytes(pickle.dumps(programs))
    play(tmp_path)
    answers = [pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(SIZE)]
    found = differences(programs, answers)
    assert not found, "\n".join([f"{len(found)} of {count} programs differ", *found[:20]])
