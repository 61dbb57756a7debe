"""A rank's environment is torchrun's, and gives every rank a place of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.run.environment import LaunchedJob, rank_environment, rank_variables

DUMP = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""

# torchrun's, for torch's own use: NCCL's watchdog, a file for a rank's traceback, its signals.
ONLY_TORCHRUN = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}
# The values that a launcher is free to choose.
CHOSEN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}


@st.composite
def jobs(draw: st.DrawFn) -> list[LaunchedJob]:
    """A job, as each of its nodes sees it."""
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    if len(set(counts)) == 1 and draw(st.booleans()):
        return [LaunchedJob(n, len(counts), k, "host", 29500) for k, n in enumerate(counts)]
    return [
        LaunchedJob(n, len(counts), k, "host", 29500, counts=tuple(counts))
        for k, n in enumerate(counts)
    ]


@given(jobs())
def test_ranks_of_all_nodes_are_numbered_without_gaps(nodes: list[LaunchedJob]) -> None:
    ranks = [
        int(rank_variables(job, local_rank, 0)["RANK"])
        for job in nodes
        for local_rank in range(job.nproc)
    ]
    assert ranks == list(range(nodes[0].world_size))


@given(jobs(), st.integers(0, 5))
def test_all_ranks_have_the_same_environment_except_their_place(
    nodes: list[LaunchedJob], restart: int
) -> None:
    place = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE"}
    seen = {
        tuple(sorted((k, v) for k, v in rank_variables(job, i, restart).items() if k not in place))
        for job in nodes
        for i in range(job.nproc)
    }
    assert len(seen) == 1


@given(st.dictionaries(st.sampled_from(["RANK", "HOME", "OMP_NUM_THREADS"]), st.text(max_size=3)))
def test_the_users_variables_stay_and_the_jobs_win(inherited: dict[str, str]) -> None:
    result = rank_environment(LaunchedJob(2), 1, 0, inherited)
    assert result["RANK"] == "1"
    assert result["OMP_NUM_THREADS"] == inherited.get("OMP_NUM_THREADS", "1")
    assert result.get("HOME") == inherited.get("HOME")


def test_a_single_rank_may_use_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in rank_environment(LaunchedJob(1), 0, 0, {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"nproc": 0},
        {"nproc": 1, "nnodes": 0},
        {"nproc": 1, "node_rank": 1},
        {"nproc": 1, "max_restarts": -1},
    ],
)
def test_an_impossible_job_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"not|outside"):
        LaunchedJob(**wrong)


def _dumped(launcher: list[str], folder: Path, environment: dict[str, str]) -> list[dict[str, str]]:
    folder.mkdir()
    program = folder / "dump.py"
    program.write_text(DUMP)
    words = [*launcher, "--nproc-per-node", "2", str(program), str(folder)]
    subprocess.run(words, env=environment, check=True, capture_output=True, timeout=100)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def test_scripts_find_what_torchrun_gives_them(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    theirs = _dumped(torchrun, tmp_path / "theirs", environment)
    ours = _dumped([sys.executable, "-m", "nc10d.run"], tmp_path / "ours", environment)
    for rank in range(2):
        expected = set(theirs[rank].items()) - set(environment.items())
        names = {name for name, _ in expected} - ONLY_TORCHRUN
        assert names <= ours[rank].keys()
        same = {(k, v) for k, v in expected if k in names - CHOSEN}
        assert same <= set(ours[rank].items())
