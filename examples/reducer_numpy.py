"""Train a network in plain NumPy, its gradients averaged while the backward pass still runs.

    python -m nc10d.run --nproc-per-node 2 examples/reducer_numpy.py
    mpiexec -n 2 python examples/reducer_numpy.py --mpi

Every rank learns the same function from samples of its own. The backward pass is written by hand,
layer by layer from the last to the first; each gradient is written straight into its bucket, and
`grad_ready` lets a bucket leave as soon as it is full. The same is trained with buckets that stay
until the pass has ended: what that costs more is what overlap saves. (It saves nothing where the
cores that would carry the data are busy computing.) With --mpi it is trained a third time as one
would with mpi4py alone: an Allreduce for each gradient when the pass has ended, and a division. All
ways take turns, step by step, so that they meet the same machine.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import numpy as np

import nc10d as dist

WIDTHS = [64, 512, 512, 512, 512, 1]
SAMPLES = 64
STEPS = 40
LEARNING_RATE = 0.002
BUCKET = 1 << 20

Arrays = list[np.ndarray]
Ready = Callable[[int], None]
Averaged = Callable[[Callable[[Arrays, Ready], None]], Arrays]
"""Lets a backward pass write gradients and say which is ready; returns the means."""


def new_model() -> Arrays:
    """Return weights and biases, layer by layer: the same on every rank."""
    rng = np.random.default_rng(0)
    shapes = itertools.pairwise(WIDTHS)
    pairs = ((rng.normal(0, np.sqrt(2 / n), (n, m)), np.zeros(m)) for n, m in shapes)
    return [x.astype(np.float32) for pair in pairs for x in pair]


def samples(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points and the values to learn, of this rank and step alone."""
    x = np.random.default_rng((rank, step)).normal(size=(SAMPLES, WIDTHS[0])).astype(np.float32)
    return x, np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def forward(model: Arrays, x: np.ndarray) -> Arrays:
    """Return the input and the output of every layer."""
    found = [x]
    for at in range(0, len(model), 2):
        x = x @ model[at] + model[at + 1]
        found.append(np.maximum(x, 0) if at + 2 < len(model) else x)
    return found


def backward(
    model: Arrays, outputs: Arrays, y: np.ndarray, gradients: Arrays, ready: Ready
) -> None:
    """Write the gradients of the mean squared error, last layer first; say when each is ready."""
    error = 2 * (outputs[-1] - y) / len(y)
    for at in range(len(model) - 2, -1, -2):
        before = outputs[at // 2]
        np.sum(error, axis=0, out=gradients[at + 1])
        ready(at + 1)
        np.matmul(before.T, error, out=gradients[at])
        ready(at)
        error = (error @ model[at].T) * (before > 0)


def by_reducer(model: Arrays, delay: bool) -> Averaged:
    """Return what averages by a Reducer, bucket by bucket, or all when the pass has ended."""
    group = dist.get_default_group()
    reducer = dist.Reducer(
        model, group, cap_bytes=BUCKET, first_bytes=BUCKET, delay_all_reduce=delay
    )

    def averaged(run: Callable[[Arrays, Ready], None]) -> Arrays:
        reducer.rebuild()  # after the first pass: buckets in the order of arrival
        reducer.begin()
        run(reducer.gradients, reducer.grad_ready)
        reducer.finish()
        return reducer.gradients

    return averaged


def by_hand(model: Arrays) -> Averaged:
    """Return what averages by mpi4py: gradient by gradient when the pass has ended."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    gradients = [np.zeros_like(x) for x in model]

    def averaged(run: Callable[[Arrays, Ready], None]) -> Arrays:
        run(gradients, lambda _index: None)
        for gradient in gradients:
            comm.Allreduce(MPI.IN_PLACE, gradient)
            gradient /= comm.size
        return gradients

    return averaged


def step(model: Arrays, number: int, averaged: Averaged) -> tuple[float, float]:
    """Take one step; return this rank's loss, and the seconds that it took."""
    x, y = samples(dist.get_rank(), number)
    dist.barrier()  # so that nobody's step has another rank's lateness in it
    began = time.perf_counter()
    outputs = forward(model, x)
    means = averaged(lambda gradients, ready: backward(model, outputs, y, gradients, ready))
    for parameter, gradient in zip(model, means, strict=True):
        parameter -= LEARNING_RATE * gradient
    return float(np.mean((outputs[-1] - y) ** 2)), time.perf_counter() - began


def equal_on_all_ranks(model: Arrays) -> bool:
    """Compare every weight, bit by bit, with rank 0's."""
    mine = np.concatenate([w.ravel() for w in model]).view(np.uint32)
    theirs = mine.copy()
    dist.broadcast(theirs, src=0)
    differing = np.array([np.count_nonzero(mine != theirs)])
    dist.all_reduce(differing)
    return bool(differing[0] == 0)


def main() -> int:
    """Train in each way; return 0 if each ends with the same weights on all ranks."""
    dist.init_process_group()
    models = {name: new_model() for name in ("with overlap", "without")}
    ways = {name: by_reducer(model, name == "without") for name, model in models.items()}
    if "--mpi" in sys.argv[1:]:
        models["mpi4py by hand"] = new_model()
        ways["mpi4py by hand"] = by_hand(models["mpi4py by hand"])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(STEPS):
        for name, averaged in ways.items():
            found[name].append(step(models[name], number, averaged))
    same = all(map(equal_on_all_ranks, models.values()))
    same &= all(map(np.array_equal, models["with overlap"], models["without"]))
    if dist.get_rank() == 0:
        for name, steps in found.items():
            loss, took = np.mean([x[0] for x in steps[-5:]]), np.median([x[1] for x in steps])
            print(f"{name:<15} loss {loss:.3f} (of this rank's last samples), {1e3 * took:.2f} ms")
        print(f"weights of {dist.get_world_size()} rank(s): {'equal' if same else 'DIFFERENT'}")
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C is no reason for a traceback from every rank
