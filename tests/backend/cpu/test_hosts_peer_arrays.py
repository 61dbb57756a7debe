"""Large arrays of ranks that share a host, in groups that span hosts: processes with host ids."""

from __future__ import annotations

import pytest
from jobs import Job

from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS, DIRECT

EVERYTHING = """
os.environ["NC10D_HOST_ID"] = {names!r}[rank]
group = join()
chance = np.random.default_rng(5)


def new(kind, *shape):
    make = dist.zeros if kind == "registered" else np.zeros
    return make(np.prod(shape) + 1, np.float32)[1:].reshape(shape)  # begins inside a page


def check(what, got, want):
    assert np.array_equal(got, want), (what, kind, nbytes)


for kind, nbytes in (("registered", {direct}), ("plain", {asked})):
    each = -(-nbytes // 4 // size)
    values = chance.integers(-9, 9, (size, size, each)).astype(np.float32)
    x = new(kind, size, each)
    for op, fold in ((dist.ReduceOp.SUM, np.sum), (dist.ReduceOp.MAX, np.max)):
        x[:] = values[rank]
        group.all_reduce(x, op)
        check("all_reduce", x, fold(values, 0))
    for root in range(size):
        x[:] = values[rank]
        group.broadcast(x, root)
        check("broadcast", x, values[root])
    part, out = new(kind, each), new(kind, size, each)
    part[:] = values[rank, 0]
    group.all_gather_into_tensor(out, part)
    check("all_gather_into_tensor", out, values[:, 0])
    outs = [new(kind, each) for _ in range(size)]
    group.all_gather(outs, part)
    check("all_gather", np.stack(outs), values[:, 0])
    x[:] = values[rank]
    group.reduce_scatter_tensor(part, x)
    check("reduce_scatter_tensor", part, values[:, rank].sum(0))
    group.reduce_scatter_tensor(x[rank], x)  # into its own place
    check("in place", x[rank], values[:, rank].sum(0))
    x[:] = values[rank]
    group.all_to_all_single(out, x)
    check("all_to_all_single", out, values[:, rank])
    # Of one array only some ranks' can be read: their hosts go over staging buffers.
    mixed = x if rank % 2 else [new("plain", each) for _ in range(size)]
    if rank % 2:
        group.all_gather_into_tensor(mixed, part)
    else:
        group.all_gather(mixed, part)
    check("of both kinds", np.stack(list(mixed)), [values[:, r].sum(0) for r in range(size)])
say("right")
"""


NAMES = [
    "aabb",
    "aab",
    *(pytest.param(names, marks=pytest.mark.long) for names in ("abab", "aaab", "aabbc")),
]


@pytest.mark.parametrize("names", NAMES)
def test_arrays_that_local_peers_read_in_place_are_reduced_right(names: str) -> None:
    script = EVERYTHING.format(names=names, direct=DIRECT + 4, asked=DEFAULTS.read_from + 4)
    with Job(script, len(names)) as ranks:
        for rank in ranks:
            assert rank.line(60.0) == "right"
