"""Device arrays on UCC, over the emulators of libucc and libcuda."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from emulated import emulators
from emulated_ucc import emulated

from nc10d import cuda
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, MAX, SUM
from nc10d.testing import Ranks

SIZE = 2


def on_devices(group: ProcessGroup) -> None:
    device, rank = group.rank % cuda.device_count(), group.rank
    own = np.arange(6, dtype=np.float32) + rank

    def put(x: np.ndarray) -> cuda.DeviceArray:  # type: ignore[type-arg]
        return cuda.to_device(x, device)

    for op, want in (
        (SUM, 2 * np.arange(6) + 1),
        (MAX, np.arange(6) + 1),
        (AVG, np.arange(6) + 0.5),
    ):
        x = put(own)
        group.all_reduce(x, op)
        assert (cuda.to_host(x) == want).all()
    x = put(own)
    work = group.broadcast(x, 1, async_op=True)
    assert work is not None
    work.wait()
    assert (cuda.to_host(x) == np.arange(6) + 1).all()
    out = put(np.zeros(12, np.float32))
    group.all_gather_into_tensor(out, put(own))
    assert (cuda.to_host(out) == [*range(6), *range(1, 7)]).all()
    piece = put(np.zeros(3, np.float32))
    group.reduce_scatter_tensor(piece, put(own))
    assert (cuda.to_host(piece) == (2 * np.arange(6) + 1)[3 * rank : 3 * rank + 3]).all()
    swapped = put(np.zeros(6, np.float32))
    group.all_to_all_single(swapped, put(own))
    come = cuda.to_host(swapped)[3 * (1 - rank) :][:3]
    assert (come == np.arange(6)[3 * rank :][:3] + 1 - rank).all()
    host = np.ones(3)
    group.all_reduce(host)
    assert (host == SIZE).all()


def test_collectives_run_on_device_arrays_beside_host_arrays(tmp_path: Path) -> None:
    with emulators(), emulated(tmp_path), Ranks(SIZE, "processes", "ucc", timeout=20.0) as ranks:
        ranks.run(on_devices)
