"""A Slurm cluster with a single node, for the time of a test.

The controller and the node daemon use a folder of the test and free ports, without accounting and
without munge (a single machine and user). Requires root and Debian's slurmctld and slurmd.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def available() -> bool:
    """Return whether a cluster can be started here."""
    return os.geteuid() == 0 and all(map(shutil.which, ("slurmctld", "slurmd", "srun")))


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster; yield the environment for srun, which itself waits for the cluster."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with contextlib.ExitStack() as held:
        ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        controller_port, node_port = (s.getsockname()[1] for s in ports)
    text = CONFIGURATION.format(
        host=socket.gethostname().split(".")[0],
        folder=folder,
        controller_port=controller_port,
        node_port=node_port,
    )
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with _daemon("slurmctld", folder, environment), _daemon("slurmd", folder, environment):
        yield environment


@contextlib.contextmanager
def _daemon(name: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [name, "-D"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()
