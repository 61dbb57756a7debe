"""Train a small transformer to continue Python's own help texts, letter by letter.

    pip install ".[torch,demo,bench]"    # in the checkout: torch, rich, and matplotlib for --plot
    python -m nc10d.run --nproc-per-node 4 examples/torch_ddp.py --ddp nc10d
    python -m nc10d.run --nproc-per-node 4 examples/torch_ddp.py --ddp torch

Every rank reads different passages of the text. DistributedDataParallel averages the gradients
during the backward pass: nc10d's, or torch's over gloo. Everything else is the same, so both loss
curves agree. `--plot` draws the loss; `--against` names a run to compare with.

With `--uneven`, rank r ends r steps early, in a block of `join`. With `--keep FILE`, the job keeps
its state there, and goes on from it when it is started again. With `--mixed`, nc10d computes and
reduces in bfloat16; the optimizer works in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

CONTEXT = 48
WIDTH = 96
HEADS = 4
LAYERS = 2
BATCH = 8
LEARNING_RATE = 2e-3
NEAR = 0.02
"""The largest allowed difference of two curves, since the order of additions differs."""

COLUMNS = (
    TextColumn("loss {task.fields[loss]:.3f}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


class Letters:
    """The help texts as a tensor with a number per letter."""

    def __init__(self) -> None:
        text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
        self.alphabet = sorted(set(text))
        number = {letter: index for index, letter in enumerate(self.alphabet)}
        self.whole = torch.tensor([number[letter] for letter in text])

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's passages of a step, and the next letter for each of their letters."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        starts = torch.randint(len(self.whole) - CONTEXT - 1, (BATCH,), generator=generator)
        passages = self.whole[starts[:, None] + torch.arange(CONTEXT + 1)]
        return passages[:, :-1], passages[:, 1:]

    def read(self, numbers: Iterable[int]) -> str:
        """Return the text of a sequence of numbers."""
        return "".join(self.alphabet[number] for number in numbers)


class Transformer(nn.Module):
    """Predicts each letter of a passage from the letters before it."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, letters, bias=False)
        self.out.weight = self.letter.weight  # input and output share a table
        nn.init.normal_(self.letter.weight, std=WIDTH**-0.5)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score of every letter for every position."""
        length = x.shape[1]
        seen = self.letter(x) * WIDTH**0.5 + self.place.weight[:length]
        return self.out(self.blocks(seen, self.mask[:length, :length], is_causal=True))


def data_parallel(kind: str, model: nn.Module, mixed: bool) -> nn.Module:
    """Join the process group; return the model wrapped in DistributedDataParallel."""
    if kind == "torch":
        if mixed:
            raise SystemExit("torch's DistributedDataParallel has no mixed precision on the CPU")
        torch.distributed.init_process_group("gloo")
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    import nc10d
    import nc10d.torch

    nc10d.init_process_group()
    low = nc10d.torch.MixedPrecision(torch.bfloat16) if mixed else None
    return nc10d.torch.DistributedDataParallel(
        model, gradient_as_bucket_view=True, mixed_precision=low
    )


def destroy_group(kind: str) -> None:
    """Destroy the process group."""
    if kind == "torch":
        torch.distributed.destroy_process_group()
    else:
        sys.modules["nc10d"].destroy_process_group()


class Kept:
    """The state of a job in a file that rank 0 writes, or nothing without a file."""

    def __init__(self, kind: str, path: Path | None, model: nn.Module, optimizer: Any) -> None:
        self._kind, self._path, self._parts = kind, path, {"model": model, "optimizer": optimizer}

    def start(self) -> tuple[int, list[float]]:
        """Load the state, if there is one; return the step to go on with, and earlier losses."""
        if self._path is None or not self._path.exists():
            return 0, []
        if self._kind == "nc10d":
            state = sys.modules["nc10d.torch"].load(self._path)
        else:
            state = torch.load(self._path, weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        return state["step"], state["losses"]

    def save(self, step: int, losses: list[float]) -> None:
        """Save the state before a step; every rank calls."""
        if self._path is None:
            return
        state = {name: part.state_dict() for name, part in self._parts.items()}
        state |= {"step": step, "losses": losses}
        if self._kind == "nc10d":
            sys.modules["nc10d.torch"].save(state, self._path)
            return
        if torch.distributed.get_rank() == 0:
            torch.save(state, self._path)
        torch.distributed.barrier()


def train(
    model: nn.Module, letters: Letters, rank: int, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Train in place; return this rank's losses, and the duration of each step in seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    kept = Kept(options.ddp, options.keep, model, optimizer)
    first, losses = kept.start()
    times = []
    uneven = model.join() if options.uneven else contextlib.nullcontext()
    steps = options.steps - (rank if options.uneven else 0)
    with Progress(*COLUMNS, disable=rank != 0) as progress, uneven:
        bar = progress.add_task("", total=steps, completed=first, loss=0.0)
        for step in range(first, steps):
            began = time.perf_counter()
            x, y = letters.batch(rank, step)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            times.append(time.perf_counter() - began)
            progress.update(bar, completed=step + 1, loss=losses[-1])
    kept.save(options.steps, losses)
    return losses, times


@torch.no_grad()
def continued(model: Transformer, letters: Letters, count: int) -> str:
    """Return the first passage of the help texts, continued by `count` letters of the model."""
    text = letters.whole[:CONTEXT]
    for _ in range(count):
        scores = model(text[None, -CONTEXT:])[0, -1]
        text = torch.cat([text, scores.argmax()[None]])
    return letters.read(text.tolist())


def smooth(losses: list[float], width: int = 20) -> list[float]:
    """Return the mean of the last `width` losses at each step."""
    parts = [losses[max(0, end - width) : end] for end in range(1, len(losses) + 1)]
    return [sum(part) / len(part) for part in parts]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draw the loss over the steps into a PNG file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(smooth(losses), style, label=name)
    axes.set(xlabel="step", ylabel="loss of rank 0 (mean of 20 steps), nats a letter")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def report(kind: str, losses: list[float], options: argparse.Namespace) -> bool:
    """Save, compare and draw as the options ask; return whether the curves agree."""
    curves = {f"{kind}'s DDP": losses}
    agree = True
    if options.against:
        name, other = json.loads(options.against.read_text())
        worst = max(abs(a - b) for a, b in zip(smooth(losses), smooth(other), strict=True))
        agree = worst <= NEAR
        found = "the same curve" if agree else "ANOTHER CURVE"
        print(f"{found} as with {name}: at most {worst:.1e} apart")
        curves[name] = other
    if options.save:
        options.save.write_text(json.dumps([f"{kind}'s DDP", losses]))
    if options.plot:
        draw(curves, options.plot)
        print(f"drawn into {options.plot}")
    return agree


def main() -> int:
    """Train; return 1 if the loss differs from the run of `--against`, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ddp", choices=["nc10d", "torch"], default="nc10d")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mixed", action="store_true", help="compute and reduce in bfloat16")
    parser.add_argument("--uneven", action="store_true", help="rank r ends r steps early")
    parser.add_argument("--keep", type=Path, help="keep the state here, and go on from it")
    parser.add_argument("--plot", type=Path, help="draw the loss into this PNG file")
    parser.add_argument("--save", type=Path, help="write the losses to this file")
    parser.add_argument("--against", type=Path, help="losses of another run, to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    letters = Letters()
    model = Transformer(len(letters.alphabet))
    parallel = data_parallel(options.ddp, model, options.mixed)
    losses, times = train(parallel, letters, rank, options)
    agree = True
    if rank == 0:
        spent = f", {1e3 * statistics.median(times):.1f} ms a step" if times else ""
        print(f"{options.ddp}'s DDP: loss {smooth(losses)[-1]:.3f}{spent}")
        agree = report(options.ddp, losses, options)
        print(f"...{continued(model, letters, 150)[-150:]!r}")
    destroy_group(options.ddp)
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C: no traceback from every rank
