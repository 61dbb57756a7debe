"""Ranks as Ray actors: `pip install ray`, then `python examples/on_ray.py [RANKS]`."""

from __future__ import annotations

import secrets
import socket
import sys

import numpy as np
import ray

import nc10d as dist


@ray.remote(num_cpus=1)
class Rank:
    """A rank of the job, in a process of its own."""

    def address(self) -> str:
        """Return an address of this rank's machine with a port that is free at the moment."""
        with socket.create_server(("", 0)) as listener:
            return f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def total(self, address: str, rank: int, size: int) -> float:
        """Add the ranks' numbers over all ranks."""
        dist.init_process_group(init_method=f"tcp://{address}", rank=rank, world_size=size)
        x = np.array([float(rank)])
        dist.all_reduce(x)
        dist.destroy_process_group()
        return float(x[0])


def main(size: int) -> None:
    # The token admits these ranks alone; every machine of the cluster gets it.
    ray.init(runtime_env={"env_vars": {"NC10D_TOKEN": secrets.token_hex(32)}})
    ranks = [Rank.remote() for _ in range(size)]
    address = ray.get(ranks[0].address.remote())
    totals = ray.get([actor.total.remote(address, r, size) for r, actor in enumerate(ranks)])
    assert totals == [size * (size - 1) / 2] * size
    print(f"{size} ranks of Ray agree on {totals[0]}")
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
