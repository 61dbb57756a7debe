"""The same script, unchanged, under every launcher that people use.

The commands of the first table are those of docs/running.md.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm

pytest.importorskip("torch")  # and with it torchrun

Script = Callable[..., str]

# With torchrun's and mpirun's defaults, and with nothing but `import nc10d as dist`.
pytestmark = pytest.mark.slow
SUM = """
    import numpy as np
    import nc10d as dist

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.full(1000, rank + 1.0)
    dist.all_reduce(x)
    dist.destroy_process_group()
    print(f"rank {rank} of {size}: {x.min()} {x.max()}\\n", end="", flush=True)
"""
EXPECTED = [f"rank {rank} of 3: 6.0 6.0" for rank in range(3)]

TORCH_SUM = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    print("sum", x.item())
    dist.destroy_process_group()
"""

BIN = Path(sys.executable).parent
PAGE = Path(__file__).parents[2] / "docs" / "running.md"
RECIPES = re.findall(r"^## ([\w.]+)\n\n```sh\n(.*) sum\.py\n```", PAGE.read_text(), re.M)


def in_this_python(command: str) -> list[str]:
    """Return the words of a command, with the programs of this Python environment."""
    words = {"python": sys.executable, "torchrun": f"{BIN}/torchrun", "mpirun": f"{BIN}/mpirun"}
    return [words.get(word, word) for word in shlex.split(command)]


LAUNCHERS = {
    **{name: in_this_python(command) for name, command in RECIPES if name != "SLURM"},
    "torchrun, static": [
        *(str(BIN / "torchrun"), "--nproc-per-node", "3"),
        *("--master-addr", "127.0.0.1", "--master-port", "PORT"),
    ],
}


def test_the_page_has_these_recipes() -> None:
    assert [name for name, _ in RECIPES] == ["nc10d.run", "torchrun", "mpirun", "SLURM"]


def rank_lines(command: list[str], environment: dict[str, str]) -> list[str]:
    """Run `command`; return the lines of its ranks, in order of rank."""
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"^(?:\[rank \d\] )?(rank .*)", done.stdout, re.M))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_script_runs_unchanged_under(
    name: str, environment: dict[str, str], script: Script, free_port: int
) -> None:
    command = [word.replace("PORT", str(free_port)) for word in LAUNCHERS[name]]
    assert rank_lines([*command, script(SUM)], environment) == EXPECTED


def test_a_script_runs_unchanged_under_mpirun_with_an_address(
    environment: dict[str, str], script: Script, free_port: int
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    assert rank_lines([*LAUNCHERS["mpirun"], script(SUM)], {**environment, **address}) == EXPECTED


# As srun does it: tasks of a numbered step, without an address or a port.
SRUN = """#!{python}
import os, subprocess, sys
_, count, *command = sys.argv[1:]
step = {{"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": count}}
tasks = [
    subprocess.Popen(command, env={{**os.environ, **step, "SLURM_PROCID": str(task)}})
    for task in range(int(count))
]
sys.exit(max(task.wait() for task in tasks))
"""


def test_the_recipe_of_slurm_runs_with_srun_s_variables(
    environment: dict[str, str], tmp_path: Path, script: Script
) -> None:
    """The variables are those that srun sets on a single node."""
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o700)
    name, *words = in_this_python(dict(RECIPES)["SLURM"])
    assert name == "srun"
    assert rank_lines([str(srun), *words, script(SUM)], environment) == EXPECTED


@pytest.mark.skipif(not slurm.available(), reason="needs root, slurmctld, slurmd and srun")
def test_a_script_runs_unchanged_under_srun(tmp_path: Path, script: Script) -> None:
    path = script(SUM)
    with slurm.cluster(tmp_path) as environment:
        assert rank_lines(["srun", "-n", "3", sys.executable, path], environment) == EXPECTED


def test_torchs_own_collectives_run_under_nc10ds_launcher(
    environment: dict[str, str], script: Script
) -> None:
    words = [sys.executable, "-m", "nc10d.run", "--no-prefix", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*words, script(TORCH_SUM)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "sum 2.0\n" * 2, done.stderr
