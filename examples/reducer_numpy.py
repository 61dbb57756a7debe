"""Train a network in plain NumPy, its gradients averaged while the backward pass still runs.

    python -m nc10d.run --nproc-per-node 2 examples/reducer_numpy.py

Every rank learns the same function from samples of its own. The backward pass is written by hand,
layer by layer from the last to the first; each gradient is written straight into its bucket, and
`grad_ready` lets a bucket leave as soon as it is full. The same steps are timed with the buckets
leaving at the end only: what that costs more is what overlap saves. (It saves nothing where the
cores that would carry the data are busy computing.)
"""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np

import nc10d as dist

WIDTHS = [64, 512, 512, 512, 512, 1]
SAMPLES = 64
STEPS = 40
LEARNING_RATE = 0.002

Arrays = list[np.ndarray]


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


def backward(model: Arrays, outputs: Arrays, y: np.ndarray, reducer: dist.Reducer) -> None:
    """Write the gradients of the mean squared error into the reducer, last layer first."""
    error = 2 * (outputs[-1] - y) / len(y)
    for at in range(len(model) - 2, -1, -2):
        before = outputs[at // 2]
        np.sum(error, axis=0, out=reducer.gradients[at + 1])
        reducer.grad_ready(at + 1)
        np.matmul(before.T, error, out=reducer.gradients[at])
        reducer.grad_ready(at)
        error = (error @ model[at].T) * (before > 0)


def train(cap_bytes: int) -> tuple[Arrays, float, float]:
    """Train with buckets of this size; return the model, the last loss and the time of a step."""
    rank = dist.get_rank()
    model = new_model()
    reducer = dist.Reducer(
        model, dist.get_default_group(), cap_bytes=cap_bytes, first_bytes=cap_bytes
    )
    times, loss = [], 0.0
    for step in range(STEPS):
        x, y = samples(rank, step)
        dist.barrier()  # so that nobody's step has another rank's lateness in it
        began = time.perf_counter()
        reducer.begin()
        outputs = forward(model, x)
        backward(model, outputs, y, reducer)
        reducer.finish()
        for parameter, gradient in zip(model, reducer.gradients, strict=True):
            parameter -= LEARNING_RATE * gradient
        times.append(time.perf_counter() - began)
        loss = float(np.mean((outputs[-1] - y) ** 2))
        reducer.rebuild()
    return model, loss, float(np.median(times))


def equal_on_all_ranks(model: Arrays) -> bool:
    """Compare every weight, bit by bit, with rank 0's."""
    mine = np.concatenate([w.ravel() for w in model]).view(np.uint32)
    theirs = mine.copy()
    dist.broadcast(theirs, src=0)
    differing = np.array([np.count_nonzero(mine != theirs)])
    dist.all_reduce(differing)
    return bool(differing[0] == 0)


def main() -> int:
    """Train both ways; return 0 if both end with the same weights on all ranks."""
    dist.init_process_group()
    whole, loss, at_once = train(1 << 30)  # one bucket, which leaves with the last gradient
    model, _, overlapped = train(1 << 20)
    same = all(map(np.array_equal, whole, model)) and equal_on_all_ranks(model)
    if dist.get_rank() == 0:
        print(f"loss after {STEPS} steps: {loss:.3f} (of this rank's last samples)")
        print(f"time per step: {1e3 * overlapped:.2f} ms with overlap, {1e3 * at_once:.2f} without")
        print(f"weights of {dist.get_world_size()} rank(s): {'equal' if same else 'DIFFERENT'}")
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C is no reason for a traceback from every rank
