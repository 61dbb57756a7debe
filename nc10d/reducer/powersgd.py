"""PowerSGD: a gradient as the product of two thin matrices, which are what travels.

Contract: as every hook, but for one thing: the hook blocks until the first of the two matrices is
reduced. A callback that launched the second one would do so at another place on each rank.

With M a rank's gradient as a matrix, and Q thin, orthonormal and the same on all ranks:
P = sum of M Q over the ranks, orthonormalised; Q = mean of M^T P; the reduced gradient is P Q^T.
What that leaves out of M is added to the rank's next gradient (error feedback), and Q is where the
next pass begins (warm start). Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization" (2019), algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.ops import AVG, SUM, Array, ReduceOp
from nc10d.reducer.hooks import GradBucket, PassHook, allreduce_hook, started
from nc10d.work import Future, Work, collect_all

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

Shapes = Sequence[tuple[int, int]]


class PowerSGDState:
    """The state of `powerSGD_hook` and `batched_powerSGD_hook`; arguments are c10d's.

    The factors have `matrix_approximation_rank` columns. The first `start_powerSGD_iter` passes are
    plain means; with error feedback or a warm start they are two at least, since buckets are
    rebuilt after the first. A gradient is compressed only if that makes it `min_compression_rate`
    times smaller. `orthogonalization_epsilon` keeps columns of zeros from a division by zero.
    `random_seed` is the same on all ranks. A pickled state has no group: set `process_group`.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
    ) -> None:
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError("error feedback and warm start need start_powerSGD_iter of 2 or more")
        self.process_group = process_group
        self.rank = matrix_approximation_rank
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.epsilon = orthogonalization_epsilon
        self.passes = PassHook(start_powerSGD_iter)
        self.errors: dict[int, Array] = {}
        self.factors: dict[int, Array] = {}
        self._random = np.random.default_rng(random_seed)
        self._elements = [0, 0]

    @property
    def group(self) -> ProcessGroup:
        """The group; ValueError if a pickled state has not been given one."""
        if self.process_group is None:
            raise ValueError("a PowerSGDState that was pickled needs a process_group: set it")
        return self.process_group

    def compression_stats(self) -> tuple[float, int, int]:
        """Return how many times fewer elements have travelled, and how many before and after."""
        before, after = self._elements
        return (before / after if after else 0.0), before, after

    def count(self, before: int, after: int) -> None:
        """Take note that `after` elements travel for `before`."""
        self._elements[0] += before
        self._elements[1] += after

    def worth_it(self, shape: tuple[int, int]) -> bool:
        """Say whether a gradient of this shape gets small enough."""
        n, m = shape
        return (n + m) * self.columns(shape) * self.min_compression_rate < n * m

    def columns(self, shape: tuple[int, int]) -> int:
        """Return how many columns the factors of a matrix have."""
        return min(*shape, self.rank)

    def factors_of(self, index: int, matrices: Sequence[Array]) -> tuple[Array, list[Array]]:
        """Return the Qs with which bucket `index` begins, flat and as views.

        They are those of its last pass. New ones, and columns in which nothing is left (a gradient
        was zero), are random: the same on all ranks, since all see the same.
        """
        thin = [(x.shape[1], self.columns(x.shape)) for x in matrices]
        flat = self.factors.get(index) if self.warm_start else None
        if flat is None:
            flat = np.zeros(sum(m * r for m, r in thin), _wide(matrices))
        self.factors[index] = flat
        views = _cut(flat, thin)
        for q in views:
            empty = ~q.any(axis=0)
            q[:, empty] = self._random.standard_normal((len(q), int(empty.sum())))
        return flat, views

    def with_errors(self, index: int, matrices: Sequence[Array]) -> list[Array]:
        """Return wide copies of gradients, plus what the last pass has left out of them."""
        wide = [x.astype(_wide(matrices)) for x in matrices]
        if index in self.errors:
            for x, error in zip(wide, _cut(self.errors[index], _shapes(wide)), strict=True):
                x += error
        return wide

    def remember(self, index: int, errors: Sequence[Array]) -> None:
        """Keep what a pass has left out."""
        if self.use_error_feedback:
            self.errors[index] = _joined(errors)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Work | Future[Array]:
    """Average each gradient of the bucket that is worth it as two factors, the others as they are.

    A gradient is a matrix by its first dimension.
    """
    bucket.on_host()  # sparse ones, and those on devices, are refused from the first pass on
    if not state.passes.begun(bucket):
        return allreduce_hook(state.group, bucket)
    gradients = [as_buffer(x).as_numpy() for x in bucket.gradients()]
    matrices: list[Array] = []
    plain: list[Array] = []
    for x in gradients:
        matrix = x.reshape(len(x), -1) if x.ndim and x.size else x.reshape(1, -1)
        (matrices if state.worth_it(matrix.shape) else plain).append(matrix)
    return _Step(state, bucket, matrices, plain).launch()


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Work | Future[Array]:
    """Average the whole bucket as two factors, as if it was a square: quicker and less exact."""
    flat = bucket.on_host()
    if not state.passes.begun(bucket):
        return allreduce_hook(state.group, bucket)
    side = math.ceil(math.sqrt(flat.size))
    square = np.zeros(side * side, flat.dtype)
    square[: flat.size] = flat
    step = _Step(state, bucket, [square.reshape(side, side)])

    def cut(ended: Future[Any]) -> Array:
        ended.value()
        flat[...] = square[: flat.size]
        return bucket.buffer()

    return step.launch().then(cut)


class _Step:
    """One bucket on its way: `matrices` become the mean's approximation, `plain` the mean."""

    def __init__(
        self,
        state: PowerSGDState,
        bucket: GradBucket,
        matrices: Sequence[Array],
        plain: Sequence[Array] = (),
    ) -> None:
        self._state, self._bucket = state, bucket
        self._matrices, self._plain = matrices, plain
        self._local = state.with_errors(bucket.index(), matrices)
        self._rest = _joined(plain)
        self._q, self._qs = state.factors_of(bucket.index(), matrices)
        thin = [(len(x), state.columns(x.shape)) for x in matrices]
        self._p = np.empty(sum(n * r for n, r in thin), _wide(matrices))
        self._ps = _cut(self._p, thin)

    def launch(self) -> Future[Array]:
        """Take all steps but the last, which the Future is; blocks for P."""
        rest = self._reduce(self._rest, AVG)
        self._state.count(self._rest.size, self._rest.size)
        self._state.count(sum(x.size for x in self._local), self._p.size + self._q.size)
        for x, p, q in zip(self._local, self._ps, self._qs, strict=True):
            np.matmul(x, orthonormal(q, self._state.epsilon), out=p)
        self._reduce(self._p, SUM).wait()
        for x, p, q in zip(self._local, self._ps, self._qs, strict=True):
            p[...] = orthonormal(p, self._state.epsilon)
            np.matmul(x.T, p, out=q)
        works = [rest, self._reduce(self._q, AVG)]
        return collect_all([work.get_future() for work in works]).then(self._restore)

    def _reduce(self, flat: Array, op: ReduceOp) -> Work:
        reduction = self._bucket.reduction(op)
        return started(self._state.group.all_reduce(flat, reduction, async_op=True))

    def _restore(self, ended: Future[list[Future[Any]]]) -> Array:
        for each in ended.value():
            each.value()
        for x, mean in zip(self._plain, _cut(self._rest, _shapes(self._plain)), strict=True):
            x[...] = mean
        for x, local, p, q in zip(self._matrices, self._local, self._ps, self._qs, strict=True):
            product = p @ q.T
            x[...] = product
            local -= product
        self._state.remember(self._bucket.index(), self._local)
        return self._bucket.buffer()


def orthonormal(columns: Array, epsilon: float = 0) -> Array:
    """Return orthonormal columns that span what `columns` (n, r) span, one after another.

    Gram-Schmidt's method in its stable form; lengths count as `epsilon` longer than they are. A
    column of zeros stays one.
    """
    found = columns.copy()
    for at in range(found.shape[1]):
        column = found[:, at]
        column /= (np.linalg.norm(column) + epsilon) or 1
        rest = found[:, at + 1 :]
        rest -= np.outer(column, column @ rest)
    return found


def _joined(arrays: Sequence[Array]) -> Array:
    """Return a flat copy of all; narrow floats stay as they are."""
    return np.concatenate([x.reshape(-1) for x in arrays]) if arrays else np.zeros(0, np.float32)


def _wide(matrices: Sequence[Array]) -> type[np.floating[Any]]:
    """Return the type in which factors of matrices are computed and travel."""
    return np.float64 if any(x.dtype == np.float64 for x in matrices) else np.float32


def _shapes(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    return [x.shape for x in arrays]


def _cut(flat: Array, shapes: Shapes) -> list[Array]:
    """Return views of consecutive pieces of `flat` with these shapes."""
    ends = np.cumsum([n * m for n, m in shapes], dtype=np.int64)
    pieces = np.split(flat, ends[:-1]) if len(shapes) else []
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
