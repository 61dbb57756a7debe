"""The demo: it learns the same with any number of ranks, and ends on Ctrl-C."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from at_terminal import AtTerminal
from clocks import soon
from hypothesis import given
from hypothesis import strategies as st

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_example", DIGITS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digits = load_example()


@given(st.integers(0, 200), st.integers(1, 9))
def test_shares_make_up_the_batch(count: int, size: int) -> None:
    batch = np.arange(count)
    shares = [digits.share_of(batch, rank, size) for rank in range(size)]
    assert np.array_equal(np.concatenate(shares), batch)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_gradients_of_shares_add_up_to_the_batchs() -> None:
    x, y, _, _ = digits.load()
    model = digits.new_model()
    whole = digits.gradient_sums(model, x[:10], y[:10])
    parts = [digits.gradient_sums(model, x[i : i + 5], y[i : i + 5]) for i in (0, 5)]
    for gradient, first, second in zip(whole, *parts, strict=True):
        np.testing.assert_allclose(first + second, gradient, atol=1e-12)


def test_gradients_are_the_slope_of_the_loss() -> None:
    x, y, _, _ = digits.load()
    x, y = x[:4], y[:4]
    model = digits.new_model()

    def loss(weight: float) -> float:
        weights = [w.copy() for w in model]
        weights[2][3, y[0]] = weight
        scores = digits.forward(weights, x)[1]
        return float((np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(4), y]).sum())

    at, step = float(model[2][3, y[0]]), 1e-5
    slope = (loss(at + step) - loss(at - step)) / (2 * step)
    assert digits.gradient_sums(model, x, y)[2][3, y[0]] == pytest.approx(slope, abs=1e-7)


@pytest.mark.slow
def test_every_number_of_ranks_learns_the_same(launch: Launch) -> None:
    accuracies = set()
    for ranks in (1, 4):
        done = launch("--nproc-per-node", str(ranks), "--no-prefix", str(DIGITS))
        assert done.returncode == 0, done.stderr
        assert f"weights of {ranks} rank(s): bitwise equal" in done.stdout
        assert "time per step: " in done.stdout
        (accuracy,) = re.findall(r"^test accuracy: (\d\d\.\d) %$", done.stdout, re.MULTILINE)
        accuracies.add(float(accuracy))
    assert len(accuracies) == 1
    assert accuracies.pop() > 95


@pytest.mark.slow
def test_ctrl_c_at_the_keyboard_ends_the_command_without_output_within_a_second(
    environment: dict[str, str],
) -> None:
    def attempt() -> float:
        words = ["-m", "nc10d.run", "--nproc-per-node", "4", str(DIGITS)]
        with AtTerminal([sys.executable, *words], environment) as demo:
            demo.read_until("epoch")
            code, seconds = demo.interrupt()
        assert code == 130, demo.screen
        assert "Traceback" not in demo.screen
        return seconds

    assert soon(1.0, attempt)
