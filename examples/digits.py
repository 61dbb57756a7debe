"""Train a small network on handwritten digits, data-parallel, in plain NumPy.

    pip install ".[demo]"    # in the checkout: scikit-learn, whose digits these are, and rich
    python -m nc10d.run --nproc-per-node 4 examples/digits.py

Every rank has the whole model and a share of each global batch. A rank sums the gradients of its
share, and `all_reduce` adds these sums over the ranks. Divided by the size of the global batch,
they are the gradient that a single process would compute. So the number of ranks changes the speed
and the rounding, but not the result. (In float64, rounding is too small to change a single
prediction.)
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from sklearn.datasets import load_digits

import nc10d as dist

SEED = 0
EPOCHS = 200
GLOBAL_BATCH = 120
LEARNING_RATE = 0.05
MOMENTUM = 0.9
HIDDEN = 256
TEST_IMAGES = 360

COLUMNS = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()

Arrays = list[np.ndarray]


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return train images, train labels, test images and test labels, the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(images))
    images, labels = images[order] / 16, labels[order]
    test, train = slice(0, TEST_IMAGES), slice(TEST_IMAGES, None)
    return images[train], labels[train], images[test], labels[test]


def new_model() -> Arrays:
    """Return weights and biases of 64 -> HIDDEN -> 10, the same on every rank."""
    rng = np.random.default_rng(SEED)
    shapes = [(64, HIDDEN), (HIDDEN, 10)]
    weights = [rng.normal(0, np.sqrt(2 / n), (n, m)) for n, m in shapes]
    return [weights[0], np.zeros(HIDDEN), weights[1], np.zeros(10)]


def forward(model: Arrays, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden layer and the ten scores of each image."""
    w1, b1, w2, b2 = model
    hidden = np.maximum(x @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def gradient_sums(model: Arrays, x: np.ndarray, y: np.ndarray) -> Arrays:
    """Return the gradients of the cross-entropy loss, summed over the images of `x`."""
    hidden, scores = forward(model, x)
    at_scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    at_scores /= at_scores.sum(axis=1, keepdims=True)
    at_scores[np.arange(len(y)), y] -= 1
    at_hidden = (at_scores @ model[2].T) * (hidden > 0)
    return [x.T @ at_hidden, at_hidden.sum(axis=0), hidden.T @ at_scores, at_scores.sum(axis=0)]


def share_of(batch: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Return this rank's share of the global batch; shares differ by at most an image."""
    return batch[rank * len(batch) // size : (rank + 1) * len(batch) // size]


def average(gradients: Arrays, count: int) -> None:
    """Make each array the average over the global batch of `count` images, on every rank."""
    with dist.coalescing_manager():  # four arrays in a single submission
        for gradient in gradients:
            dist.all_reduce(gradient)
    for gradient in gradients:
        gradient /= count


def train(model: Arrays, x: np.ndarray, y: np.ndarray, progress: Progress) -> tuple[float, float]:
    """Train in place; return the seconds per step spent computing and communicating."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shuffler = np.random.default_rng(SEED)  # all ranks shuffle in the same way
    velocity = [np.zeros_like(w) for w in model]
    bar = progress.add_task("epoch", total=EPOCHS)
    computing = communicating = 0.0
    steps = 0
    for epoch in range(EPOCHS):
        order = shuffler.permutation(len(x))
        for start in range(0, len(x), GLOBAL_BATCH):
            batch = order[start : start + GLOBAL_BATCH]
            share = share_of(batch, rank, size)
            began = time.perf_counter()
            gradients = gradient_sums(model, x[share], y[share])
            computed = time.perf_counter()
            average(gradients, len(batch))
            communicated = time.perf_counter()
            for w, v, gradient in zip(model, velocity, gradients, strict=True):
                v *= MOMENTUM
                v -= LEARNING_RATE * gradient
                w += v
            computing += computed - began + time.perf_counter() - communicated
            communicating += communicated - computed
            steps += 1
        progress.update(bar, completed=epoch + 1)
    return computing / steps, communicating / steps


def equal_on_all_ranks(model: Arrays) -> bool:
    """Return whether all weights of all ranks equal rank 0's, bit by bit; every rank calls."""
    own = np.concatenate([w.ravel() for w in model]).view(np.uint64)
    reference = own.copy()
    dist.broadcast(reference, src=0)
    differing = np.array([np.count_nonzero(own != reference)], np.int64)
    dist.all_reduce(differing)
    return bool(differing[0] == 0)


def main() -> int:
    """Train, test, compare; return 0 if all ranks ended with the same weights."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--backend", help='as in init_process_group: "ucc", "mpi"')
    dist.init_process_group(parser.parse_args().backend)
    train_x, train_y, test_x, test_y = load()
    model = new_model()
    with Progress(*COLUMNS, disable=dist.get_rank() != 0) as progress:
        computing, communicating = train(model, train_x, train_y, progress)
    equal = equal_on_all_ranks(model)
    if dist.get_rank() == 0:
        right = forward(model, test_x)[1].argmax(axis=1) == test_y
        ranks = dist.get_world_size()
        spent = f"{1e6 * computing:.0f} µs computing, {1e6 * communicating:.0f} µs communicating"
        print(f"time per step: {spent} (waiting for other ranks included)")
        print(f"weights of {ranks} rank(s): {'bitwise equal' if equal else 'DIFFERENT'}")
        print(f"test accuracy: {100 * right.mean():.1f} %")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C: no traceback from every rank
