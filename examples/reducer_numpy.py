"""Train a network in plain NumPy, and average gradients while the backward pass still runs.

    python -m nc10d.run --nproc-per-node 2 examples/reducer_numpy.py
    mpiexec -n 2 python examples/reducer_numpy.py --mpi

Every rank learns the same function from samples of its own. The backward pass is written by hand,
layer by layer from the last to the first. It writes each gradient directly into its bucket, and
`grad_ready` launches a bucket as soon as it is full.

The example also trains with buckets that are launched after the pass: the difference in time is the
gain of the overlap. (There is no gain if the cores that transfer the data are busy computing.) With
--mpi it trains a third time by mpi4py alone: an Allreduce and a division for each gradient after
the pass. All variants alternate step by step, so that they see the same load of the machine.
"""

from __future__ import annotations

import argparse
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
"""Calls a backward pass, which writes gradients and marks them as ready; returns the means."""


def new_model() -> Arrays:
    """Return weights and biases, layer by layer, the same on every rank."""
    rng = np.random.default_rng(0)
    shapes = itertools.pairwise(WIDTHS)
    pairs = ((rng.normal(0, np.sqrt(2 / n), (n, m)), np.zeros(m)) for n, m in shapes)
    return [x.astype(np.float32) for pair in pairs for x in pair]


def samples(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of this rank and step, and the values to learn."""
    x = np.random.default_rng((rank, step)).normal(size=(SAMPLES, WIDTHS[0])).astype(np.float32)
    return x, np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def forward(model: Arrays, x: np.ndarray) -> Arrays:
    """Return the input and the output of every layer."""
    outputs = [x]
    for index in range(0, len(model), 2):
        x = x @ model[index] + model[index + 1]
        outputs.append(np.maximum(x, 0) if index + 2 < len(model) else x)
    return outputs


def backward(
    model: Arrays, outputs: Arrays, y: np.ndarray, gradients: Arrays, ready: Ready
) -> None:
    """Write the gradients of the mean squared error, last layer first; mark each as ready."""
    error = 2 * (outputs[-1] - y) / len(y)
    for index in range(len(model) - 2, -1, -2):
        before = outputs[index // 2]
        np.sum(error, axis=0, out=gradients[index + 1])
        ready(index + 1)
        np.matmul(before.T, error, out=gradients[index])
        ready(index)
        error = (error @ model[index].T) * (before > 0)


def by_reducer(model: Arrays, delay: bool) -> Averaged:
    """Return a function that averages by a Reducer, during the pass or (`delay`) after it."""
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
    """Return a function that averages by mpi4py, gradient by gradient after the pass."""
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
    """Take a training step; return this rank's loss and the duration in seconds."""
    x, y = samples(dist.get_rank(), number)
    dist.barrier()  # so that the time of a step excludes the delay of other ranks
    began = time.perf_counter()
    outputs = forward(model, x)
    means = averaged(lambda gradients, ready: backward(model, outputs, y, gradients, ready))
    for parameter, gradient in zip(model, means, strict=True):
        parameter -= LEARNING_RATE * gradient
    return float(np.mean((outputs[-1] - y) ** 2)), time.perf_counter() - began


def equal_on_all_ranks(model: Arrays) -> bool:
    """Return whether all weights of all ranks equal rank 0's, bit by bit; every rank calls."""
    own = np.concatenate([w.ravel() for w in model]).view(np.uint32)
    reference = own.copy()
    dist.broadcast(reference, src=0)
    differing = np.array([np.count_nonzero(own != reference)])
    dist.all_reduce(differing)
    return bool(differing[0] == 0)


def main() -> int:
    """Train all variants; return 0 if each ends with the same weights on all ranks."""
    parser = argparse.ArgumentParser(description="Average gradients during the backward pass.")
    parser.add_argument("--backend", help='as in init_process_group: "ucc", "mpi"')
    parser.add_argument("--mpi", action="store_true", help="train by mpi4py alone, too")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    models = {name: new_model() for name in ("with overlap", "without")}
    ways = {name: by_reducer(model, name == "without") for name, model in models.items()}
    if options.mpi:
        models["mpi4py by hand"] = new_model()
        ways["mpi4py by hand"] = by_hand(models["mpi4py by hand"])
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(STEPS):
        for name, averaged in ways.items():
            results[name].append(step(models[name], number, averaged))
    same = all(map(equal_on_all_ranks, models.values()))
    same &= all(map(np.array_equal, models["with overlap"], models["without"]))
    if dist.get_rank() == 0:
        for name, steps in results.items():
            loss, took = np.mean([x[0] for x in steps[-5:]]), np.median([x[1] for x in steps])
            print(f"{name:<15} loss {loss:.3f} (of this rank's last samples), {1e3 * took:.2f} ms")
        print(f"weights of {dist.get_world_size()} rank(s): {'equal' if same else 'DIFFERENT'}")
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C: no traceback from every rank
