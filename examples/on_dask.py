"""Ranks as tasks of Dask: `pip install distributed`, then `python examples/on_dask.py [RANKS]`."""

from __future__ import annotations

import os
import secrets
import socket
import sys

import numpy as np
from distributed import Client, LocalCluster

import nc10d as dist


def free_address() -> str:
    """Return an address of this machine with a port that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def total(rank: int, size: int, address: str) -> float:
    """Add the ranks' numbers over all ranks."""
    dist.init_process_group(init_method=f"tcp://{address}", rank=rank, world_size=size)
    x = np.array([float(rank)])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return float(x[0])


def main(size: int) -> None:
    # The token admits these ranks alone; workers inherit it.
    os.environ["NC10D_TOKEN"] = secrets.token_hex(32)
    with LocalCluster(n_workers=size, threads_per_worker=1) as cluster, Client(cluster) as client:
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        address = client.submit(free_address, workers=[workers[0]]).result()
        # All ranks at once, each on its own worker: a rank waits for the others.
        tasks = [
            client.submit(total, rank, size, address, workers=[worker], pure=False)
            for rank, worker in enumerate(workers)
        ]
        totals = client.gather(tasks)
    assert totals == [size * (size - 1) / 2] * size
    print(f"{size} ranks of Dask agree on {totals[0]}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
