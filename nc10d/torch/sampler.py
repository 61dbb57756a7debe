"""torch's DistributedSampler, which asks nc10d for the rank and the number of ranks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler as TorchSampler

from nc10d.api.queries import get_rank, get_world_size


class DistributedSampler(TorchSampler):  # type: ignore[type-arg, unused-ignore]
    """This rank's share of indices into `dataset`, as in torch.utils.data.DistributedSampler.

    `num_replicas` and `rank` are by default those in nc10d's default group (ValueError if there is
    none). The other arguments, and `set_epoch`, are torch's.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        size = get_world_size() if num_replicas is None else num_replicas
        super().__init__(
            dataset, size, get_rank() if rank is None else rank, shuffle, seed, drop_last
        )
