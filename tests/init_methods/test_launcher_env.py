"""A rank's place is read from the environment of each launcher."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.errors import RendezvousError
from nc10d.init_methods.launcher_env import RankPlace, find_place, first_node, launcher_ancestor

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
# `mpirun -n 2` of MPICH 5.0 (Hydra), the second process.
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
# `srun -n 2` of Slurm 22.05 on a node (the second task), without useless variables.
SRUN = {
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_GTIDS": "0,1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "vm",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2",
}
# The same variables as they would be on two nodes; made up, not recorded.
SRUN_TWO_NODES = SRUN | {
    "SLURM_JOB_NODELIST": "tux[007-008]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "tux[007-008]",
    "SLURM_STEP_NUM_NODES": "2",
}


def place(
    environment: dict[str, str], rank: int | None = None, size: int | None = None
) -> RankPlace:
    return find_place(environment, rank, size, lambda: "mpirun-1-2")


def test_torchruns_variables_precede_other_launchers():
    assert place({**SRUN, **TORCHRUN}) == RankPlace(1, 4, "node7", 29500)
    served = place({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert served.served
    assert not place({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).served


def test_arguments_of_the_call_precede_the_environment():
    assert place(TORCHRUN, rank=0, size=2).rank == 0
    assert place(TORCHRUN, size=7).size == 7
    with pytest.raises(RendezvousError, match="outside"):
        place(TORCHRUN, rank=4)


@pytest.mark.parametrize("name", sorted(TORCHRUN))
def test_a_missing_variable_is_named_with_how_to_set_it(name: str):
    there = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(RendezvousError, match=rf"{name} is not set.*export"):
        place(there)


@pytest.mark.parametrize("bad", [{"RANK": "one"}, {"MASTER_PORT": "0"}, {"MASTER_PORT": "x"}])
def test_a_variable_that_makes_no_sense_is_named(bad: dict[str, str]):
    with pytest.raises(RendezvousError, match=next(iter(bad))):
        place({**TORCHRUN, **bad})


@pytest.mark.parametrize(
    ("environment", "rank", "size", "host"),
    [
        (HYDRA, 1, 2, "127.0.0.1"),
        (OPEN_MPI, 0, 2, "127.0.0.1"),
        (SRUN, 1, 2, "127.0.0.1"),
        (SRUN_TWO_NODES, 1, 2, "tux007"),
    ],
)
def test_other_launchers_ranks_agree_on_a_place(environment, rank, size, host):
    found = place(environment)
    assert (found.rank, found.size, found.host, found.served) == (rank, size, host, False)
    assert 10000 <= found.port < 30000
    assert found.job
    number = next(name for name in environment if name.endswith(("_RANK", "_PROCID")))
    assert place({**environment, number: "0"}).port == found.port
    address = {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    assert place(environment | address) == RankPlace(rank, size, "h", 29500)


def test_two_jobs_on_one_host_derive_places_of_their_own():
    first, second = (find_place(HYDRA, None, None, lambda j=job: j) for job in "ab")
    assert first.job != second.job
    assert first.port != second.port


def test_ranks_on_several_hosts_need_an_address_where_none_is_shared():
    spread = {**HYDRA, "MPI_LOCALNRANKS": "1"}
    with pytest.raises(RendezvousError, match="MASTER_ADDR"):
        place(spread)
    with pytest.raises(RendezvousError, match="MASTER_PORT"):
        place({**spread, "MASTER_ADDR": "node1"})


def test_a_batch_script_is_no_task_of_srun():
    script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    with pytest.raises(RendezvousError, match="RANK is not set"):
        place(script)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("tux", "tux"),
        ("a,b", "a"),
        ("tux[3-9]", "tux3"),
        ("tux[007,9]", "tux007"),
        ("tux[1-2].site,x", "tux1.site"),
        ("n-1-[04-05]", "n-1-04"),
    ],
)
def test_the_first_node_of_a_list_is_found(nodes: str, first: str):
    assert first_node(nodes) == first


@given(st.integers(0, 1 << 30), st.integers(0, 99))
def test_a_derived_port_is_below_the_kernels_range(job: int, step: int):
    found = place({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
    assert 10000 <= found.port < 30000
    assert str(job) in found.job


def test_the_launchers_process_is_found_behind_a_shell():
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("needs mpirun")
    code = (
        "from nc10d.init_methods.launcher_env import launcher_ancestor as f\n"
        "print(f() + chr(10), end='')"
    )
    shell = f'{sys.executable} -c "{code}"; true'
    done = subprocess.run(
        [mpirun, "-n", "2", "sh", "-c", shell], capture_output=True, text=True, timeout=200
    )
    ancestors = done.stdout.split()
    assert len(ancestors) == 2, done.stderr
    assert len(set(ancestors)) == 1
    assert ancestors[0].startswith("hydra")
    assert launcher_ancestor().startswith(("parent-", "hydra", "slurm", "mpi"))


def test_ranks_of_mpirun_find_each_other_without_any_variable():
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("needs mpirun")
    script = """
        from nc10d.init_methods.methods import rendezvous
        for number in range(2):
            store, rank, size = rendezvous(timeout=30)
            store.add("sum", rank + 1)
            store.barrier("added", size)
            print(f"{number}: {store.get('sum').decode()}" + chr(10), end="", flush=True)
            store.close()
    """
    done = subprocess.run(
        [mpirun, "-n", "3", sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(done.stdout.split("\n")) == ["", *["0: 6"] * 3, *["1: 6"] * 3], done.stderr


def test_a_launchers_name_may_be_any_bytes():
    child = "from nc10d.init_methods.launcher_env import launcher_ancestor as f; print(f())"
    # prctl(PR_SET_NAME): a name that was cut in the middle of a character.
    parent = (
        "import ctypes, subprocess, sys; ctypes.CDLL(None).prctl(15, b'\\xd1\\x81\\xd0'); "
        f"sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.startswith(("parent-", "hydra", "slurm", "mpi")), done.stderr
