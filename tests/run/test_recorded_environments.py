"""Launchers that cannot run here: nc10d reads their recorded environments."""

from __future__ import annotations

import pytest

from nc10d.init_methods.launcher_env import find_place

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


@pytest.mark.parametrize(
    ("environment", "host"),
    [(SRUN, "127.0.0.1"), (SRUN_TWO_NODES, "tux007"), (HYDRA, "127.0.0.1")],
    ids=["srun", "srun on two nodes", "mpirun"],
)
def test_a_rank_finds_its_place(environment: dict[str, str], host: str) -> None:
    place = find_place(environment, None, None, lambda: "the launcher")
    assert (place.rank, place.size, place.host, place.served) == (1, 2, host, False)


@pytest.mark.parametrize("environment", [SRUN, HYDRA], ids=["srun", "mpirun"])
def test_all_ranks_derive_one_port(environment: dict[str, str]) -> None:
    first = environment | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PMI_RANK": "0"}
    if environment is SRUN:
        del first["PMI_RANK"]
    ports = {find_place(e, None, None, lambda: "x").port for e in (first, environment)}
    assert len(ports) == 1


def test_nc10ds_launcher_takes_precedence_inside_an_allocation() -> None:
    ours = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    place = find_place(SRUN | ours, None, None, lambda: "x")
    assert (place.rank, place.size, place.host, place.port) == (3, 4, "h", 1)
