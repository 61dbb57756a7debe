"""Models that exercise different features of data-parallel training, with batches for each rank.

Sizes are small, and numbers are double: the mean of two ranks then has the same bits in any order
of additions.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def perceptron():
    return nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)
    )


def convolution():
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 2)).to(
        memory_format=torch.channels_last
    )


class Transformer(nn.Module):
    """A transformer block, and an output that shares the weights of the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.block(self.embed(x)))


class Rows(nn.Module):
    """An embedding and a bag of them with sparse gradients, beside a dense layer."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(11, 4, sparse=True)
        self.bags = nn.EmbeddingBag(11, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rows(x).sum(1) * self.bags(x))


class Checkpointed(nn.Module):
    """Recomputes its blocks in the backward pass, by nested backward passes (checkpointing)."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=True))
        return x


class Branches(nn.Module):
    """Takes a branch of three by its argument; the last branch is never taken.

    The second output takes no part in the backward pass.
    """

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)
        self.beside = nn.Linear(4, 1)

    def forward(self, x, branch):
        return {"y": [self.head(self.branches[branch](x))], "beside": self.beside(x)}


class Repeats(nn.Module):
    """Applies the same layer as often as the batch's numbers require."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rare = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(int(x.abs().sum()) % 3 + 1):
            x = torch.tanh(self.layer(x))
        return self.rare(x) if x.sum() > 0 else x


def numbers(rank, step, *shape):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tokens(rank, step, *shape):
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(100 * step + rank))


ZOO = {
    "perceptron": (perceptron, lambda r, s: (numbers(r, s, 5, 6),)),
    "convolution": (convolution, lambda r, s: (numbers(r, s, 3, 2, 6, 6),)),
    "transformer": (Transformer, lambda r, s: (tokens(r, s, 2, 5),)),
    "rows": (Rows, lambda r, s: (tokens(r, s, 3, 4),)),
    "checkpointed": (Checkpointed, lambda r, s: (numbers(r, s, 3, 4),)),
    "branches": (Branches, lambda r, s: (numbers(r, s, 3, 4), (r + s) % 2)),
    "repeats": (Repeats, lambda r, s: (numbers(r, s, 3, 4),)),
}


def make(name):
    """Return a new model, different on each call, in double precision."""
    return ZOO[name][0]().double()


def inputs(name, rank, step):
    """Return the arguments of a call of the model."""
    return ZOO[name][1](rank, step)


def loss(output):
    """Return the mean square of all outputs."""
    found = output["y"][0] if isinstance(output, dict) else output
    return (found**2).mean()
