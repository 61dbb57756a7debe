"""A rank's environment variables. Pure: from the job's description to a dict.

Names and meanings are torchrun's, so that a script runs alike under both launchers.
NC10D_RESTART_COUNT repeats TORCHELASTIC_RESTART_COUNT under our own name. Ranks are numbered node
after node; nodes may run different numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """A job as seen from a node, which runs `nproc` ranks.

    `counts` are all nodes' numbers of ranks; empty if every node runs `nproc`. With `keep_going`,
    the other ranks go on after a rank has failed. `local_addr` is this node's address for others.
    With `as_gloo`, torch's groups are nc10d's in the ranks where the program names gloo.
    """

    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    run_id: str = "none"
    role: str = "default"
    max_restarts: int = 0
    keep_going: bool = False
    local_addr: str | None = None
    counts: tuple[int, ...] = ()
    as_gloo: bool = False

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ValueError(f"a node runs at least 1 rank, not {self.nproc}")
        if self.nnodes < 1:
            raise ValueError(f"a job has at least 1 node, not {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node rank {self.node_rank} is outside 0..{self.nnodes - 1}")
        if self.max_restarts < 0:
            raise ValueError(f"max restarts must be >= 0, not {self.max_restarts}")

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes together."""
        return sum(self.counts) or self.nnodes * self.nproc

    def global_rank(self, local_rank: int) -> int:
        """Return the rank in the job of this node's `local_rank`."""
        before = self.counts[: self.node_rank] or [self.nproc] * self.node_rank
        return sum(before) + local_rank


def rank_variables(job: LaunchedJob, local_rank: int, restart: int) -> dict[str, str]:
    """Return the variables that give a rank its place; `restart` counts from 0."""
    rank = job.global_rank(local_rank)
    values: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": job.nproc,
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": job.master_port,
        "GROUP_RANK": job.node_rank,
        "GROUP_WORLD_SIZE": job.nnodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": job.world_size,
        "ROLE_NAME": job.role,
        "TORCHELASTIC_RESTART_COUNT": restart,
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_RUN_ID": job.run_id,
        # Node 0's launcher hosts the store, so every rank is a client, rank 0 too.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "NC10D_RESTART_COUNT": restart,
        **({"NC10D_SOCKET_ADDRESS": job.local_addr} if job.local_addr else {}),
        **({"NC10D_AS_GLOO": 1} if job.as_gloo else {}),
    }
    return {name: str(value) for name, value in values.items()}


def rank_environment(
    job: LaunchedJob, local_rank: int, restart: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return a rank's whole environment: `inherited`, then the job's variables on top.

    Several ranks on a node get OMP_NUM_THREADS=1 unless the user chose another number: N ranks
    that each start a thread per core would fight over the cores. CUDA reads the number of a
    device's hardware queues once, as its driver starts: streams that share a queue wait for each
    other, so ranks get all 32 (CUDA's guide, environment variables) unless the user chose.
    """
    defaults = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if job.nproc > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    return {**defaults, **inherited, **rank_variables(job, local_rank, restart)}
