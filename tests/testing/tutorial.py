"""Programs of a first tutorial, their tests, and ten mistakes that beginners make in them."""

from typing import NamedTuple

PROGRAMS = '''
import numpy as np
import pytest
import nc10d as dist
from nc10d.testing import assert_partition, assert_reduced, assert_replicated


def shard(count, rank, size):
    """Return the indices of a data set that a rank works on."""
    low, high = count * rank // size, count * (rank + 1) // size
    return range(low, high)


def new_weights(world):
    """Rank 0 draws the weights, and all others get them."""
    weights = np.random.default_rng(world.rank).random(8)
    dist.broadcast(weights, src=0)
    return weights


def step(weights, gradient, world):
    """Average the gradient while the norm is computed, then move the weights."""
    work = dist.all_reduce(gradient, op=dist.ReduceOp.AVG, async_op=True)
    norm = np.sqrt((weights**2).sum())
    work.wait()
    weights -= 0.1 * gradient / norm
    return norm


def train(weights, world, steps):
    """Stop together, as soon as any rank says so."""
    for number in range(steps):
        stop = np.array([float(number + world.rank > 3)])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop[0]:
            break
        step(weights, np.full(8, world.rank + 1.0), world)
    dist.barrier()


def exchange_borders(mine, world):
    """Swap a border with the neighbour in a pair."""
    other = 1 - world.rank
    theirs = np.empty_like(mine)
    if world.rank == 0:
        dist.send(mine, other)
        dist.recv(theirs, other)
    else:
        dist.recv(theirs, other)
        dist.send(mine, other)
    return theirs


def save(weights, world):
    """Rank 0 collects the parts of a checkpoint."""
    parts = [np.empty(8) for _ in range(world.size)] if world.rank == 0 else None
    dist.gather(weights, parts, dst=0)
    return parts


@pytest.mark.ranks(3)
def test_shards(world):
    assert_partition(shard(10, world.rank, world.size), 10)


@pytest.mark.ranks(3)
def test_weights(world):
    assert_replicated(new_weights(world))


@pytest.mark.ranks(3)
def test_step(world):
    weights, gradient = np.ones(8), np.full(8, world.rank + 1.0)
    before = gradient.copy()
    assert step(weights, gradient, world) == np.sqrt(8)
    assert_reduced(gradient, before, dist.ReduceOp.AVG)
    assert_replicated(weights)
    assert (weights < 1).all()


@pytest.mark.ranks(3)
def test_train(world):
    weights = np.ones(8)
    train(weights, world, 9)
    assert_replicated(weights)


@pytest.mark.ranks(2)
def test_borders(world):
    theirs = exchange_borders(np.full(3, float(world.rank)), world)
    assert theirs[0] == 1 - world.rank


@pytest.mark.ranks(3)
def test_save(world):
    parts = save(np.full(8, float(world.rank)), world)
    assert world.rank or [part[0] for part in parts] == [0, 1, 2]
'''


class Mistake(NamedTuple):
    """A mistake: the test that fails, the line, the line in its place, and words that explain."""

    test: str
    right: str
    wrong: str
    words: tuple[str, ...]


MISTAKES = {
    "wrong root": Mistake(
        "weights",
        "dist.broadcast(weights, src=0)",
        "dist.broadcast(weights, src=world.rank)",
        ("ranks disagree on operation #1", "root=", "argument that differs"),
    ),
    "not replicated": Mistake(
        "weights",
        "dist.broadcast(weights, src=0)",
        "pass",
        ("rank 1 holds 0.51", "at [0], must be 0.63", "8 of 8 elements"),
    ),
    "missing wait": Mistake(
        "step", "    work.wait()\n", "", ("all_reduce at test_it.py:22 had not been waited for",)
    ),
    "read before the wait": Mistake(
        "step",
        "norm = np.sqrt((weights**2).sum())\n    work.wait()",
        "weights -= 0.1 * gradient / np.sqrt(8)\n    work.wait()\n    return np.sqrt(8)",
        ("all_reduce at test_it.py:22 was waited for at test_it.py:24; before", "NaN"),
    ),
    "written in flight": Mistake(
        "step",
        "    norm =",
        "    gradient /= 2\n    norm =",
        ("output array is read-only", "all_reduce at test_it.py:22 had not been waited for"),
    ),
    "call under a condition": Mistake(
        "train",
        "        if stop[0]:\n            break\n",
        "        if number + world.rank > 3:\n            break\n",
        ("ranks disagree on operation", "barrier() at", "all_reduce(", "under a condition"),
    ),
    "early return": Mistake(
        "train",
        "        if stop[0]:\n            break\n",
        "        if world.rank == 2:\n            return\n",
        ("all_reduce(", "all_gather(", "test_it.py:84", "under a condition"),
    ),
    "off by one": Mistake(
        "shards",
        "count * (rank + 1) // size\n",
        "count * (rank + 1) // size - 1\n",
        ("the ranks do not share range(10) out", "2 is on no rank"),
    ),
    "sends that wait": Mistake(
        "borders",
        "    else:\n        dist.recv(theirs, other)\n        dist.send(mine, other)\n",
        "    else:\n        dist.send(mine, other)\n        dist.recv(theirs, other)\n",
        ("waits in send", "test_it.py:45", "test_it.py:48", "let one of the ranks receive"),
    ),
    "other sizes": Mistake("save", "np.empty(8) for _", "np.empty(4) for _", ("rank 0", "gather")),
}
