"""Read a rank's place in its job from the environment: rank, size, and where all ranks meet.

torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) take precedence; without them,
the variables of the MPI launchers and of srun are read. These launchers set no port, so all ranks
derive the same port from a name that they share: the Slurm job and step, the PMIx namespace, or, on
a single host, the launcher's process (its pid and start). The port is between 10000 and 29999,
below the ports that the kernel assigns. Rank 0 listens there. If another program has the port,
rank 0 raises an error, and MASTER_PORT chooses another port.

Pure, except that `launcher_ancestor` reads /proc.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nc10d.base.run_to_end import off_main
from nc10d.errors import RendezvousError

Environment = Mapping[str, str]
_NUMBER = re.compile(r"\s*[+-]?\d+\s*")
_FIRST_PORT, _PORTS = 10000, 20000


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This rank, the number of ranks, and the address where all meet.

    With `served`, a launcher's agent runs the store's server; with `foreign`, that server is
    torch's, which knows no tokens. `job` separates the keys of jobs whose derived ports collide.
    """

    rank: int
    size: int
    host: str
    port: int
    served: bool = False
    job: str = ""
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class _Launcher:
    """A launcher's variables: rank, size, ranks on this host, and its own marks."""

    name: str
    rank: str
    size: tuple[str, ...]
    here: str
    marks: tuple[str, ...] = ()

    def started(self, environment: Environment) -> bool:
        """Return whether this launcher started the process."""
        return self.rank in environment and all(mark in environment for mark in self.marks)


_LAUNCHERS = (
    _Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    _Launcher("mpirun", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALNRANKS"),
    # A batch script has SLURM_PROCID too, but only srun's tasks are in a numbered step.
    _Launcher(
        "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "", ("SLURM_STEP_ID",)
    ),
)
# Process names as in /proc: at most 15 letters.
_LAUNCHER_PROCESSES = (
    *("hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec.hydra", "mpiexec", "mpirun", "pmi_proxy"),
    *("orted", "orterun", "prted", "prterun", "slurmstepd"),
)


def find_place(
    environment: Environment, rank: int | None, size: int | None, ancestor: Callable[[], str]
) -> RankPlace:
    """Return the place that `environment` describes; a given `rank` or `size` takes precedence.

    `ancestor()` identifies the launcher's process on this host. RendezvousError names the missing
    or malformed variable.
    """
    launcher = None
    if "RANK" not in environment:
        launcher = next((found for found in _LAUNCHERS if found.started(environment)), None)
    if rank is None:
        rank = _number(environment, launcher.rank if launcher else "RANK")
    if size is None:
        names = launcher.size if launcher else ("WORLD_SIZE",)
        size = _number(environment, *names)
    if not 0 <= rank < size:
        raise RendezvousError(f"rank {rank} is outside a world of {size}", rank=rank)
    host, port, job = _address(environment, launcher, size, ancestor)
    served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    foreign = served and "NC10D_RESTART_COUNT" not in environment
    return RankPlace(rank, size, host, _port(port), served, job, foreign)


def _address(
    environment: Environment, launcher: _Launcher | None, size: int, ancestor: Callable[[], str]
) -> tuple[str, str, str]:
    """Return the meeting host and port, and the job's name if the port derives from it."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    job = ""
    if launcher is not None:
        host = host or _host(environment, launcher, size)
        if port is None:
            job = _job(environment, launcher, size, ancestor)
            port = str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)
    if host is None:
        raise _missing("MASTER_ADDR", "the host of rank 0")
    if port is None:
        raise _missing("MASTER_PORT", "a free port on the host of rank 0")
    return host, port, job


def _number(environment: Environment, *names: str) -> int:
    for name in names:
        if name in environment:
            return _parse_int(name, environment[name])
    what = "this process's rank" if "RANK" in names[0] else "the number of ranks"
    raise _missing(names[0], what)


def _parse_int(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise RendezvousError(f"{name}={text!r} is not a number")
    return int(text)


def _port(text: str) -> int:
    port = _parse_int("MASTER_PORT", text)
    if not 0 < port < 1 << 16:
        raise RendezvousError(f"MASTER_PORT={text} is not a port (1 to 65535)")
    return port


def _missing(name: str, what: str) -> RendezvousError:
    return RendezvousError(
        f"{name} is not set: env:// needs {what} in it. Start the script with a launcher "
        f"(python -m nc10d.run --nproc-per-node N script.py, torchrun, mpirun, srun), or export "
        f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank"
    )


def _one_host(environment: Environment, launcher: _Launcher, size: int) -> bool:
    if launcher.name == "srun":
        nodes = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        return next((environment[name] for name in nodes if name in environment), "1") == "1"
    return environment.get(launcher.here, str(size)) == str(size)


def _host(environment: Environment, launcher: _Launcher, size: int) -> str:
    if _one_host(environment, launcher, size):
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_node(nodes)
    raise RendezvousError(
        f"{launcher.name} started ranks on several hosts: set MASTER_ADDR to the host of rank 0, "
        f"the same for all ranks"
    )


def first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_node("tux[007-010,12],other")
    'tux007'
    """
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if found is None:
        raise RendezvousError(f"cannot read the node list {nodes!r}: set MASTER_ADDR")
    return "".join(part or "" for part in found.groups())


def _job(
    environment: Environment, launcher: _Launcher, size: int, ancestor: Callable[[], str]
) -> str:
    """Return a name that all ranks of this job share, and no other job."""
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" in environment:
        return f"slurm-{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    if "PMIX_NAMESPACE" in environment:
        return environment["PMIX_NAMESPACE"]
    if _one_host(environment, launcher, size):
        return ancestor()
    raise RendezvousError(
        f"{launcher.name} started ranks on several hosts: set MASTER_PORT to a free port on the "
        f"host of rank 0, the same for all ranks"
    )


@off_main
def launcher_ancestor() -> str:
    """Identify the launcher's process: the nearest ancestor with the name of a launcher.

    A shell may run between the launcher and a rank. Without such an ancestor, return the parent.
    """
    pid = os.getppid()
    while pid > 1:
        name, parent, start = _process(pid)
        if name in _LAUNCHER_PROCESSES:
            return f"{name}-{pid}-{start}"
        pid = parent
    return f"parent-{os.getppid()}"


def _process(pid: int) -> tuple[str, int, str]:
    """Return a process's name, parent and start (proc(5): fields 2, 4 and 22 of its stat)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name may be any bytes
    except OSError:
        return "", 0, ""
    begin, end = stat.index("(") + 1, stat.rindex(")")
    rest = stat[end + 2 :].split()
    return stat[begin:end], int(rest[1]), rest[19]
