"""PowerSGD: approximate a gradient by the product of two thin matrices, and send only these.

Contract: as every hook, except that the hook blocks until the first matrix is reduced. A callback
that launched the second reduction would launch it at a different point on each rank.

Let M be a rank's gradient as a matrix, and Q a thin orthonormal matrix, the same on all ranks:
P = sum of M Q over the ranks, orthonormalised; Q = mean of M^T P; the reduced gradient is P Q^T.
The error M - P Q^T is added to the rank's next gradient (error feedback). The next pass begins with
this Q (warm start). Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization" (2019), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, sqrt
from typing import Any

import numpy as np

from nc10d.group.process_group import ProcessGroup
from nc10d.ops import SUM, Array, ReduceOp
from nc10d.reducer.hooks.array_math import HOST, ArrayMath, math_of
from nc10d.reducer.hooks.builtin import allreduce_hook
from nc10d.reducer.hooks.grad_bucket import GradBucket, PassCounter, require_work
from nc10d.reducer.packing import divided
from nc10d.work import Future, Work

Shapes = Sequence[tuple[int, int]]


class PowerSGDState:
    """The state of `powerSGD_hook` and `batched_powerSGD_hook`; arguments are c10d's.

    The factors have `matrix_approximation_rank` columns. The first `start_powerSGD_iter` passes
    compute plain means. Error feedback and warm start need at least two such passes, since buckets
    are rebuilt after the first pass. A gradient is compressed only if this makes it at least
    `min_compression_rate` times smaller. `orthogonalization_epsilon` avoids a division by zero for
    columns of zeros. `random_seed` must be the same on all ranks. A `process_group` that is None
    is set to that of the Reducer with which the state is registered. A pickled state has none.
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
        self.fills: dict[int, list[Array]] = {}
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
        """Return whether a gradient with this shape reaches `min_compression_rate`."""
        n, m = shape
        return (n + m) * self.columns(shape) * self.min_compression_rate < n * m

    def columns(self, shape: tuple[int, int]) -> int:
        """Return the number of columns in a matrix's factors."""
        return min(*shape, self.rank)

    def factors_of(
        self, index: int, matrices: Sequence[Array], math: ArrayMath
    ) -> tuple[Array, list[Array]]:
        """Return the initial Qs for bucket `index`: the flat array, and the views by matrix."""
        # With warm start they are those of the bucket's last pass. New columns are random, and so
        # are columns that became zero because a gradient was zero. All ranks draw the same numbers,
        # since they have the same Qs and the same seed.
        thin = [(x.shape[1], self.columns(x.shape)) for x in matrices]
        flat = self.factors.get(index) if self.warm_start else None
        if flat is None:
            flat = math.zeros(sum(m * r for m, r in thin), math.wide(matrices))
            self.fills.pop(index, None)
        if index not in self.fills:
            self.fills[index] = [self._random.standard_normal(shape) for shape in thin]
        self.factors[index] = flat
        views = _cut(flat, thin)
        for q, values in zip(views, self.fills[index], strict=True):
            math.fill(q, values)
        return flat, views

    def with_errors(self, index: int, matrices: Sequence[Array], math: ArrayMath) -> list[Array]:
        """Return wide copies of gradients, plus the last pass's errors."""
        wide = [math.copy(x, math.wide(matrices)) for x in matrices]
        if index in self.errors:
            for x, error in zip(wide, _cut(self.errors[index], _shapes(wide)), strict=True):
                x += error
        return wide

    def remember(self, index: int, errors: Sequence[Array], math: ArrayMath) -> None:
        """Keep a pass's errors for the next pass."""
        if self.use_error_feedback:
            self.errors[index] = math.joined(errors)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Work | Future[Array]:
    """Average each compressible gradient in the bucket as two factors, and the others directly.

    A gradient becomes a matrix with one row for each index of the first dimension.
    """
    math = math_of(bucket)  # refuses sparse buckets, and some devices, from the first pass on
    if not state.passes.reached(bucket):
        return allreduce_hook(state.group, bucket)
    matrices: list[Array] = []
    plain: list[Array] = []
    shapes = [_as_matrix(tuple(x.shape)) for x in bucket.gradients()]
    # Pieces of the buffer: a gradient's own strides may be such that a matrix would be a copy.
    for matrix in _cut(math.array(bucket.flat()), shapes):
        (matrices if state.compressible(tuple(matrix.shape)) else plain).append(matrix)
    return _CompressedMean(state, bucket, math, matrices, plain).launch()


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Work | Future[Array]:
    """Average the whole bucket as the two factors of a square matrix: faster and less exact."""
    math = math_of(bucket)
    if not state.passes.reached(bucket):
        return allreduce_hook(state.group, bucket)
    flat = math.array(bucket.flat())
    side = ceil(sqrt(len(flat)))
    square = math.zeros(side * side, flat.dtype)
    square[: len(flat)] = flat

    def copy_back() -> None:
        flat[...] = square[: len(flat)]

    return _CompressedMean(state, bucket, math, [square.reshape(side, side)]).launch(copy_back)


class _CompressedMean:
    """Compresses a bucket in a pass: `matrices` get approximate means, `plain` gets exact means."""

    def __init__(
        self,
        state: PowerSGDState,
        bucket: GradBucket,
        math: ArrayMath,
        matrices: Sequence[Array],
        plain: Sequence[Array] = (),
    ) -> None:
        self._state, self._bucket, self._math = state, bucket, math
        self._matrices, self._plain = matrices, plain
        self._local = state.with_errors(bucket.index(), matrices, math)
        self._rest = math.joined(plain)
        self._q, self._qs = state.factors_of(bucket.index(), matrices, math)
        thin = [(len(x), state.columns(x.shape)) for x in matrices]
        self._p = math.zeros(sum(n * r for n, r in thin), math.wide(matrices))
        self._ps = _cut(self._p, thin)

    def launch(self, last: Callable[[], None] | None = None) -> Future[Array]:
        """Launch all steps but the last, which the Future runs; blocks until P is reduced.

        On a device only the stream waits. `last` is called when the matrices have their means.
        """
        math = self._math
        rest = self._reduce_to_mean(self._rest)
        self._state.count(len(self._rest), len(self._rest))
        self._state.count(sum(map(_count, self._local)), len(self._p) + len(self._q))
        for x, p, q in zip(self._local, self._ps, self._qs, strict=True):
            math.multiply(x, orthonormal(q, self._state.epsilon, math), p)
        self._reduce(self._p, SUM).wait()
        for x, p, q in zip(self._local, self._ps, self._qs, strict=True):
            p[...] = orthonormal(p, self._state.epsilon, math)
            math.multiply(x.T, p, q)

        def restore() -> Array:
            self._restore()
            if last is not None:
                last()
            return math.result(self._bucket)

        works = [rest, self._reduce_to_mean(self._q)]
        return math.after(self._bucket, works, restore)

    def _reduce_to_mean(self, flat: Array) -> Work:
        size = self._state.group.size
        return self._reduce(flat, divided(flat, size, size))

    def _reduce(self, flat: Array, op: ReduceOp) -> Work:
        reduction = self._bucket.reduction(op)
        group = self._math.group_of(self._state.group)
        return require_work(group.all_reduce(flat, reduction, async_op=True))

    def _restore(self) -> None:
        for x, mean in zip(self._plain, _cut(self._rest, _shapes(self._plain)), strict=True):
            x[...] = mean
        for x, local, p, q in zip(self._matrices, self._local, self._ps, self._qs, strict=True):
            product = p @ q.T
            x[...] = product
            local -= product
        self._state.remember(self._bucket.index(), self._local, self._math)


def orthonormal(columns: Array, epsilon: float = 0, math: ArrayMath = HOST) -> Array:
    """Return orthonormal columns with the span of `columns` (n, r).

    The algorithm is Gram-Schmidt, with each projection done twice. `epsilon` is added to each
    length before the division. A column of zeros stays zero, and one that depends on the columns
    before it becomes zero.
    """
    result = math.copy(columns)
    noise = 1e-14 if result.dtype.itemsize == 8 else 1e-6
    for index in range(result.shape[1]):
        before, column = result[:, :index], result[:, index]
        if index:
            whole = math.length(column, 0)
            for _ in range(2):
                column -= before @ (before.T @ column)
            # Rounding errors alone would be left, and be made a direction: for a gradient with
            # equal rows, the first column's direction, which would count twice.
            column *= math.length(column, 0) > noise * whole
        column /= math.length(column, epsilon)
    return result


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a row for each index of the first dimension; a single row without one."""
    count = int(np.prod(shape, dtype=np.int64))
    rows = shape[0] if shape and count else 1
    return rows, count // rows


def _count(matrix: Array) -> int:
    return int(matrix.shape[0] * matrix.shape[1])


def _shapes(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    return [(x.shape[0], x.shape[1]) for x in arrays]


def _cut(flat: Array, shapes: Shapes) -> list[Array]:
    """Return views of consecutive pieces of `flat` with these shapes."""
    ends = list(accumulate((n * m for n, m in shapes), initial=0))
    return [
        flat[start:end].reshape(shape)
        for start, end, shape in zip(ends, ends[1:], shapes, strict=False)
    ]
