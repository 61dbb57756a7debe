"""The public names of the kit, and errors on their way from a rank to the test's process."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from at_terminal import AtTerminal
from clocks import soon

import nc10d as dist
from nc10d import testing
from nc10d.base.promise import copy_to_raise
from nc10d.testing import Ranks, run_ranks
from nc10d.testing.local_backend import run_local
from nc10d.testing.outcomes import Outcome
from nc10d.testing.rank_workers import RankWorker, portable


def test_every_public_name_of_the_kit_can_be_imported() -> None:
    for name in testing.__all__:
        assert getattr(testing, name) is not None


def notes_length(error: BaseException) -> int:
    return sum(map(len, getattr(error, "__notes__", ())))


def test_an_error_that_ranks_share_is_reported_once() -> None:
    error = ValueError("why")
    lengths = {notes_length(portable(error)) for _ in range(5)}
    assert len(lengths) == 1
    assert "why" in error.__notes__[0]


def test_a_chain_of_errors_does_not_repeat_the_notes_of_its_causes() -> None:
    error: BaseException = portable(RuntimeError("root"))
    first = notes_length(error)
    for _ in range(12):
        outer = RuntimeError("root")
        outer.__cause__ = error
        error = portable(outer)
    assert notes_length(error) < 40 * first
    copy = copy_to_raise(error)
    assert notes_length(portable(copy)) < 40 * first


def only_rank_one_is_wrong(group: Any) -> None:
    assert group.rank == 0, "mine"
    group.barrier()


def test_an_error_of_a_rank_is_raised_at_once_without_waiting_for_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="mine"):
        run_ranks(only_rank_one_is_wrong, 2, timeout=60.0)
    assert time.monotonic() - start < 30.0


def added(group: Any, x: int, y: int) -> tuple[int, int, bool]:
    total = np.array([x * y])
    dist.all_reduce(total)
    return group.rank, int(total[0]), group is dist.get_default_group()


def test_run_local_and_run_ranks_have_the_same_signature() -> None:
    columns = [1, 2, 3], [10, 20, 30]
    expected = [(rank, 140, True) for rank in range(3)]
    assert run_local(added, 3, *columns) == expected
    assert run_ranks(added, 3, "threads", *columns) == expected
    assert run_ranks(added, 3, "processes", *columns) == expected


def test_a_column_has_an_entry_for_each_rank() -> None:
    with pytest.raises(ValueError, match="needs 3 entries, one a rank"):
        run_local(added, 3, [1, 2, 3], [1, 2])


@pytest.mark.parametrize("run", [run_local, run_ranks])
def test_a_rank_that_raises_fails_all_of_its_groups(run: Any) -> None:
    heard: list[str] = []

    def main(group: Any) -> None:
        pair = dist.new_group([0, 1])
        if group.rank == 1:
            raise AssertionError("mine")
        try:
            pair.barrier()
        except dist.Aborted as error:
            heard.append(str(error))

    with pytest.raises(AssertionError, match="mine"):
        run(main, 2, timeout=20.0)
    assert "rank 1 raised AssertionError: mine" in heard[0]


def hangs(group: Any, here: bool) -> int:
    if here:
        signal.pause()
    return int(group.rank)


@pytest.mark.slow
def test_ranks_that_do_not_answer_are_named_and_ended() -> None:
    with Ranks(2, "processes", timeout=20.0) as ranks:
        assert ranks.run(hangs, [False, False]) == [0, 1]
        first = ranks.processes()
        ranks._limit = 0.5
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not answer in 0.5 s"):
            ranks.run(hangs, [False, True])
        assert not any(process.is_alive() for process in first)
        ranks._limit = 60.0
        assert ranks.run(hangs, [False, False]) == [0, 1], "with new ranks"


class LateWorker(RankWorker):
    """A rank that answers just after its time."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome | None] = [None, Outcome(True, "late")]

    def submit(self, task: object) -> None:
        pass

    def result(self, timeout: float) -> Outcome | None:
        return self.outcomes.pop(0)

    def end(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def test_a_rank_that_answers_while_another_is_waited_for_is_not_missing() -> None:
    with Ranks(1) as ranks:
        ranks._workers = [LateWorker()]
        assert ranks.run(hangs, [False]) == ["late"]


OWNER = """
import signal, sys
if __name__ != "__main__":
    print("a rank starts", flush=True)
from nc10d.testing import Ranks

def hang(group):
    print("rank", group.rank, "hangs", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        print("rank", group.rank, "heard", flush=True)

if __name__ == "__main__":
    with Ranks(2, "processes") as ranks:
        try:
            ranks.run(hang)
        except KeyboardInterrupt:
            print("owner heard")
    sys.exit(3)
"""


@pytest.mark.parametrize("said", ["a rank starts", "hangs"])
def test_ctrl_c_goes_to_the_owner_and_ends_its_processes(tmp_path: Path, said: str) -> None:
    path = tmp_path / "owner.py"
    path.write_text(OWNER)

    def attempt() -> float:
        with AtTerminal([sys.executable, str(path)]) as owner:
            owner.read_until(said, times=2)
            code, seconds = owner.interrupt()
        assert code == 3, owner.screen
        assert "owner heard" in owner.screen
        assert "rank 0 heard" not in owner.screen
        assert "Traceback" not in owner.screen
        return seconds

    assert soon(2.0, attempt)


def interrupts_itself(group: Any) -> str:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return "heard"
    return "not heard"


def test_a_rank_can_still_be_interrupted_by_its_own_test() -> None:
    assert run_ranks(interrupts_itself, 1, "processes") == ["heard"]


def test_ranks_end_with_their_owner_however_that_ended(tmp_path: Path) -> None:
    path = tmp_path / "owner.py"
    path.write_text(OWNER)
    words = [sys.executable, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        seen = ""
        while seen.count("hangs") < 2:  # two processes write: lines may be mixed
            seen += owner.stdout.readline()
        owner.kill()
        owner.communicate(timeout=60)  # the pipe ends when no process holds it any more
