"""Train on handwritten digits, and continue with the surviving ranks after a rank is killed.

    pip install ".[demo]"    # in the checkout: scikit-learn and rich
    python -m nc10d.run --keep-going --nproc-per-node 4 examples/survive.py --victim 2

The network and its arithmetic are those of digits.py. When a rank dies, the calls of all survivors
raise PeerLost. The survivors shrink the group. They copy the state of the rank that has done most
steps, since a rank may have finished a step that failed on others. Then they divide the work again
and continue.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass

import numpy as np
from digits import (
    GLOBAL_BATCH,
    LEARNING_RATE,
    MOMENTUM,
    SEED,
    Arrays,
    average,
    equal_on_all_ranks,
    forward,
    gradient_sums,
    load,
    new_model,
    share_of,
)

import nc10d as dist


@dataclass
class State:
    """The state of training: the number of steps done, the weights, and their velocities."""

    step: int
    model: Arrays
    velocity: Arrays


def batch_of(step: int, count: int) -> np.ndarray:
    """Return the images of a step; depends only on the arguments, so all ranks agree."""
    epoch, place = divmod(step * GLOBAL_BATCH, count - count % GLOBAL_BATCH)
    order = np.random.default_rng([SEED, epoch]).permutation(count)
    return order[place : place + GLOBAL_BATCH]


def train_step(state: State, x: np.ndarray, y: np.ndarray) -> None:
    """Take a training step; after PeerLost the state is unchanged."""
    batch = batch_of(state.step, len(x))
    share = share_of(batch, dist.get_rank(), dist.get_world_size())
    gradients = gradient_sums(state.model, x[share], y[share])
    average(gradients, len(batch))
    for w, v, gradient in zip(state.model, state.velocity, gradients, strict=True):
        v *= MOMENTUM
        v -= LEARNING_RATE * gradient
        w += v
    state.step += 1


def copy_most_advanced(state: State) -> None:
    """Give every rank the state of the rank that has done most steps."""
    steps = np.zeros(dist.get_world_size(), np.int64)
    dist.all_gather_into_tensor(steps, np.array([state.step]))
    root = int(steps.argmax())
    with dist.coalescing_manager():
        for array in state.model + state.velocity:
            dist.broadcast(array, src=root)
    state.step = int(steps[root])


def train(state: State, x: np.ndarray, y: np.ndarray, steps: int, dies_at: int | None) -> None:
    """Train until `steps` are done, with the surviving ranks."""
    lost = False
    while state.step < steps:
        try:
            if lost:
                copy_most_advanced(state)
                lost = False
            train_step(state, x, y)
        except dist.PeerLost as error:
            dist.shrink_group()
            lost = True
            if dist.get_rank() == 0:
                print(f"step {state.step}: {error.cause}; {dist.get_world_size()} ranks go on")
        if dies_at is not None and state.step >= dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Train and test; return 0 if all surviving ranks end with the same weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--victim", type=int, help="this rank kills itself half-way")
    options = parser.parse_args()
    dist.init_process_group()
    x, y, test_x, test_y = load()
    model = new_model()
    state = State(0, model, [np.zeros_like(w) for w in model])
    dies = options.steps // 2 if dist.get_rank() == options.victim else None
    train(state, x, y, options.steps, dies)
    equal = equal_on_all_ranks(state.model)
    if dist.get_rank() == 0:
        right = forward(state.model, test_x)[1].argmax(axis=1) == test_y
        same = "bitwise equal" if equal else "DIFFERENT"
        print(f"weights of {dist.get_world_size()} rank(s): {same}")
        print(f"test accuracy: {100 * right.mean():.1f} %")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C: no traceback from every rank
