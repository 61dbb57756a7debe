"""Train a small transformer to continue Python's own help texts, letter by letter.

    python -m nc10d.run --nproc-per-node 4 examples/torch_ddp.py --ddp nc10d
    python -m nc10d.run --nproc-per-node 4 examples/torch_ddp.py --ddp torch

Every rank reads other places of the text. DistributedDataParallel averages the gradients while
they are still being computed: nc10d's, or torch's over gloo. Nothing else is different, so both
come down the same curve. `--plot` draws the loss; `--against` says what to compare it with.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

CONTEXT = 48
WIDTH = 96
HEADS = 4
LAYERS = 2
BATCH = 8
LEARNING_RATE = 2e-3
NEAR = 0.02
"""By how much two curves may differ: the order of additions is not the same."""

COLUMNS = (
    TextColumn("loss {task.fields[loss]:.3f}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


class Letters:
    """The help texts as one tensor of numbers, one a letter."""

    def __init__(self) -> None:
        text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
        self.alphabet = sorted(set(text))
        number = {letter: index for index, letter in enumerate(self.alphabet)}
        self.whole = torch.tensor([number[letter] for letter in text])

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return passages, and for each letter of them the next one: this rank's of this step."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        starts = torch.randint(len(self.whole) - CONTEXT - 1, (BATCH,), generator=generator)
        passages = self.whole[starts[:, None] + torch.arange(CONTEXT + 1)]
        return passages[:, :-1], passages[:, 1:]

    def read(self, numbers: Iterable[int]) -> str:
        """Return the text that numbers stand for."""
        return "".join(self.alphabet[number] for number in numbers)


class Transformer(nn.Module):
    """Predicts each next letter of a passage from those before it."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, letters, bias=False)
        self.out.weight = self.letter.weight  # one table for reading and for writing
        nn.init.normal_(self.letter.weight, std=WIDTH**-0.5)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score of every letter for every place."""
        length = x.shape[1]
        seen = self.letter(x) * WIDTH**0.5 + self.place.weight[:length]
        return self.out(self.blocks(seen, self.mask[:length, :length], is_causal=True))


def data_parallel(kind: str, model: nn.Module) -> nn.Module:
    """Join the other ranks; return the model with its gradients averaged over them."""
    if kind == "torch":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    import nc10d
    import nc10d.torch

    nc10d.init_process_group()
    return nc10d.torch.DistributedDataParallel(model, gradient_as_bucket_view=True)


def leave(kind: str) -> None:
    """Leave the group of ranks."""
    if kind == "torch":
        torch.distributed.destroy_process_group()
    else:
        sys.modules["nc10d"].destroy_process_group()


def train(
    model: nn.Module, letters: Letters, steps: int, rank: int
) -> tuple[list[float], list[float]]:
    """Train in place; return the loss of each step, of this rank's batch, and its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    losses, times = [], []
    with Progress(*COLUMNS, disable=rank != 0) as progress:
        bar = progress.add_task("", total=steps, loss=0.0)
        for step in range(steps):
            began = time.perf_counter()
            x, y = letters.batch(rank, step)
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            times.append(time.perf_counter() - began)
            progress.update(bar, completed=step + 1, loss=losses[-1])
    return losses, times


@torch.no_grad()
def continued(model: Transformer, letters: Letters, count: int) -> str:
    """Return the model's own text, from the beginning of the help texts on."""
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
    """Save, compare and draw what was asked for; say whether the curves agree."""
    curves = {f"{kind}'s DDP": losses}
    agree = True
    if options.against:
        name, theirs = json.loads(options.against.read_text())
        worst = max(abs(a - b) for a, b in zip(smooth(losses), smooth(theirs), strict=True))
        agree = worst <= NEAR
        told = "the same curve" if agree else "ANOTHER CURVE"
        print(f"{told} as with {name}: at most {worst:.1e} apart")
        curves[name] = theirs
    if options.save:
        options.save.write_text(json.dumps([f"{kind}'s DDP", losses]))
    if options.plot:
        draw(curves, options.plot)
        print(f"drawn into {options.plot}")
    return agree


def main() -> int:
    """Train; return 1 if the loss is not what it was in the run that is compared with."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ddp", choices=["nc10d", "torch"], default="nc10d")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", type=Path, help="draw the loss into this PNG file")
    parser.add_argument("--save", type=Path, help="write the losses to this file")
    parser.add_argument("--against", type=Path, help="losses of another run, to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    letters = Letters()
    model = Transformer(len(letters.alphabet))
    parallel = data_parallel(options.ddp, model)
    losses, times = train(parallel, letters, options.steps, rank)
    agree = True
    if rank == 0:
        spent = 1e3 * statistics.median(times)
        print(f"{options.ddp}'s DDP: loss {smooth(losses)[-1]:.3f}, {spent:.1f} ms a step")
        agree = report(options.ddp, losses, options)
        print(f"...{continued(model, letters, 150)[-150:]!r}")
    leave(options.ddp)
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C is no reason for a traceback from every rank
