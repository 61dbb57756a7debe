"""PowerSGD: approximate a gradient by the product of two thin matrices, and send only these.

Contract: as every hook, except that the hook blocks until the first of the two matrices is reduced.
A callback that launched the second reduction would launch it at a different point on each rank.

Let M be a rank's gradient as a matrix, and Q a thin orthonormal matrix, the same on all ranks:
P = sum of M Q over the ranks, orthonormalised; Q = mean of M^T P; the reduced gradient is P Q^T.
The error M - P Q^T is added to the rank's next gradient (error feedback). The next pass begins with
this Q (warm start). Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization" (2019), algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import SUM, Array, ReduceOp
from nc10d.reducer.hooks.builtin import allreduce_hook
from nc10d.reducer.hooks.grad_bucket import GradBucket, PassCounter, require_work
from nc10d.reducer.packing import divided
from nc10d.work import Future, Work, collect_all

Shapes = Sequence[tuple[int, int]]


class PowerSGDState:
    """The state of `powerSGD_hook` and `batched_powerSGD_hook`; arguments are c10d's.

    The factors have `matrix_approximation_rank` columns. The first `start_powerSGD_iter` passes
    compute plain means. Error feedback and warm start need at least two such passes, since buckets
    are rebuilt after the first pass. A gradient is compressed only if this makes it at least
    `min_compression_rate` times smaller. `orthogonalization_epsilon` avoids a division by zero for
    columns of zeros. `random_seed` must be the same on all ranks. A pickled state has no group: set
    `process_group` after loading.
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
        self.passes = PassCounter(start_powerSGD_iter)
        self.errors: dict[int, Array] = {}
        self.factors: dict[int, Array] = {}
        self._random = np.random.default_rng(random_seed)
        self._elements = [0, 0]

    @property
    def group(self) -> ProcessGroup:
        """The group; ValueError if an unpickled state has no group yet."""
        if self.process_group is None:
            raise ValueError("a PowerSGDState that was pickled needs a process_group: set it")
        return self.process_group

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (ratio, elements before compression, elements sent), summed over all passes."""
        before, after = self._elements
        return (before / after if after else 0.0), before, after

    def count(self, before: int, after: int) -> None:
        """Record that `after` elements are sent in place of `before`."""
        self._elements[0] += before
        self._elements[1] += after

    def compressible(self, shape: tuple[int, int]) -> bool:
        """Return whether a gradient of this shape reaches `min_compression_rate`."""
        n, m = shape
        return (n + m) * self.columns(shape) * self.min_compression_rate < n * m

    def columns(self, shape: tuple[int, int]) -> int:
        """Return the number of columns of a matrix's factors."""
        return min(*shape, self.rank)

    def factors_of(self, index: int, matrices: Sequence[Array]) -> tuple[Array, list[Array]]:
        """Return the initial Qs of bucket `index`: the flat array, and its views by matrix."""
        # With warm start they are those of the bucket's last pass. New columns are random, and so
        # are columns that became zero because a gradient was zero. All ranks draw the same numbers,
        # since they have the same Qs and the same seed.
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
        """Return wide copies of gradients, plus the errors of the last pass."""
        wide = [x.astype(_wide(matrices)) for x in matrices]
        if index in self.errors:
            for x, error in zip(wide, _cut(self.errors[index], _shapes(wide)), strict=True):
                x += error
        return wide

    def remember(self, index: int, errors: Sequence[Array]) -> None:
        """Keep the errors of a pass for the next pass."""
        if self.use_error_feedback:
            self.errors[index] = _joined(errors)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Work | Future[Array]:
    """Average each compressible gradient of the bucket as two factors, and the others directly.

    A gradient becomes a matrix with one row for each index of its first dimension.
    """
    bucket.on_host()  # refuses sparse and device buckets from the first pass on
    if not state.passes.reached(bucket):
        return allreduce_hook(state.group, bucket)
    gradients = [as_buffer(x).as_numpy() for x in bucket.gradients()]
    matrices: list[Array] = []
    plain: list[Array] = []
    for x in gradients:
        matrix = x.reshape(len(x), -1) if x.ndim and x.size else x.reshape(1, -1)
        (matrices if state.compressible(matrix.shape) else plain).append(matrix)
    return _CompressedMean(state, bucket, matrices, plain).launch()


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Work | Future[Array]:
    """Average the whole bucket as the two factors of a square matrix: faster and less exact."""
    flat = bucket.on_host()
    if not state.passes.reached(bucket):
        return allreduce_hook(state.group, bucket)
    side = math.ceil(math.sqrt(flat.size))
    square = np.zeros(side * side, flat.dtype)
    square[: flat.size] = flat
    mean = _CompressedMean(state, bucket, [square.reshape(side, side)])

    def copy_back(ended: Future[Any]) -> Array:
        ended.value()
        flat[...] = square[: flat.size]
        return bucket.buffer()

    return mean.launch().then(copy_back)


class _CompressedMean:
    """Compresses a bucket in a pass: `matrices` get approximate means, `plain` gets exact means."""

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
        """Launch all steps but the last, which the Future runs; blocks until P is reduced."""
        rest = self._reduce_to_mean(self._rest)
        self._state.count(self._rest.size, self._rest.size)
        self._state.count(sum(x.size for x in self._local), self._p.size + self._q.size)
        for x, p, q in zip(self._local, self._ps, self._qs, strict=True):
            np.matmul(x, orthonormal(q, self._state.epsilon), out=p)
        self._reduce(self._p, SUM).wait()
        for x, p, q in zip(self._local, self._ps, self._qs, strict=True):
            p[...] = orthonormal(p, self._state.epsilon)
            np.matmul(x.T, p, out=q)
        works = [rest, self._reduce_to_mean(self._q)]
        return collect_all([work.get_future() for work in works]).then(self._restore)

    def _reduce_to_mean(self, flat: Array) -> Work:
        size = self._state.group.size
        return self._reduce(flat, divided(flat, size, size))

    def _reduce(self, flat: Array, op: ReduceOp) -> Work:
        reduction = self._bucket.reduction(op)
        return require_work(self._state.group.all_reduce(flat, reduction, async_op=True))

    def _restore(self, ended: Future[list[Future[Any]]]) -> Array:
        for reduced in ended.value():
            reduced.value()
        for x, mean in zip(self._plain, _cut(self._rest, _shapes(self._plain)), strict=True):
            x[...] = mean
        for x, local, p, q in zip(self._matrices, self._local, self._ps, self._qs, strict=True):
            product = p @ q.T
            x[...] = product
            local -= product
        self._state.remember(self._bucket.index(), self._local)
        return self._bucket.buffer()


def orthonormal(columns: Array, epsilon: float = 0) -> Array:
    """Return orthonormal columns with the span of `columns` (n, r).

    The algorithm is modified Gram-Schmidt. `epsilon` is added to each length before the division. A
    column of zeros stays zero.
    """
    result = columns.copy()
    for index in range(result.shape[1]):
        column = result[:, index]
        column /= (np.linalg.norm(column) + epsilon) or 1
        rest = result[:, index + 1 :]
        rest -= np.outer(column, column @ rest)
    return result


def _joined(arrays: Sequence[Array]) -> Array:
    """Return a flat copy of all arrays, in their own dtype."""
    return np.concatenate([x.reshape(-1) for x in arrays]) if arrays else np.zeros(0, np.float32)


def _wide(matrices: Sequence[Array]) -> type[np.floating[Any]]:
    """Return the type in which factors of matrices are computed and sent."""
    return np.float64 if any(x.dtype == np.float64 for x in matrices) else np.float32


def _shapes(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    return [x.shape for x in arrays]


def _cut(flat: Array, shapes: Shapes) -> list[Array]:
    """Return views of consecutive pieces of `flat` with these shapes."""
    ends = np.cumsum([n * m for n, m in shapes], dtype=np.int64)
    pieces = np.split(flat, ends[:-1]) if len(shapes) else []
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
