"""A ZeroRedundancyOptimizer's steps inside the backward pass, as comm hooks of data parallel.

    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    model.register_comm_hook(None, hook_with_zero_step(hook, model, zero))
    loss(model(x)).backward()       # averages, steps, and sends the parameters

Contract: names and signatures are those of torch's ddp_zero_hook. Each bucket's parameters, or with
`shard_buckets` pieces of them, belong to a rank, which steps them when their gradients are means;
then every rank gets the values. All ranks launch the same operations in the same order: a bucket's
broadcasts come behind all reductions (`hook_with_zero_step`), or behind the next bucket's reduction
(`hook_with_zero_step_interleaved`). So a hook works on every backend, on the CPU too.

The buckets are final in the third pass, or in the fourth with a static graph. Passes before reduce
gradients and step nothing, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn import Module

from nc10d.group.process_group import ProcessGroup
from nc10d.optim import BucketPiece, bucket_pieces
from nc10d.reducer.hooks.deferred_future import awaited
from nc10d.reducer.hooks.grad_bucket import require_work
from nc10d.torch.optim.param_buckets import FlatParams
from nc10d.torch.tensor_bucket import TensorBucket
from nc10d.torch.tensors import as_tensor
from nc10d.torch.torch_calls import LaunchedCall
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.torch.optim.zero import ZeroRedundancyOptimizer

Bucket: TypeAlias = TensorBucket | torch.distributed.GradBucket
Hook = Callable[[Any, Any], object]


def hook_with_zero_step(
    hook: Hook, ddp: Module, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Return a hook that reduces by `hook`, and steps `zero` after the last bucket's launch.

    For communication that is slow beside the backward pass. With `shard_buckets`, several ranks may
    step parts of a bucket. ValueError if `zero` was made without `overlap_with_ddp`.
    """
    return _hook(hook, ddp, zero, shard_buckets, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: Module, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Return a hook that reduces by `hook`, and steps `zero` between buckets' launches.

    For a backward pass that is slow beside communication. A bucket is stepped at the launch of the
    next. See `hook_with_zero_step`.
    """
    return _hook(hook, ddp, zero, shard_buckets, interleaved=True)


def _hook(
    hook: Hook, ddp: Module, zero: ZeroRedundancyOptimizer, shard_buckets: bool, interleaved: bool
) -> Hook:
    if not zero.overlap_with_ddp:
        raise ValueError(
            "the hook steps a ZeroRedundancyOptimizer that is made with overlap_with_ddp=True"
        )
    steps = _Steps(zero, 3 if ddp.static_graph else 2, shard_buckets)

    def reduce_and_step(state: object, bucket: Bucket) -> object:
        steps.begin(bucket)
        outcome = hook(state, bucket)
        steps.launched(bucket, outcome)
        if interleaved:
            steps.advance(bucket.index())
        if bucket.is_last():
            steps.advance(bucket.index() + 1)
            steps.finish()
        return outcome

    reduce_and_step.__annotations__.clear()  # torch's DistributedDataParallel accepts its own alone
    reduce_and_step.__name__ = f"{getattr(hook, '__name__', 'hook')}_with_zero_step"
    return reduce_and_step


class _Piece:
    """A piece of a bucket: the parameters, and the flat tensor that holds them."""

    def __init__(
        self, place: BucketPiece, params: Sequence[torch.Tensor], group: ProcessGroup
    ) -> None:
        self.owner, self.part = place.owner, slice(place.first, place.end)
        self.params = params[self.part]
        self.memory = FlatParams(self.params, group)


class _Steps:
    """The steps of `zero` in the passes after the first `vacuous`."""

    def __init__(self, zero: ZeroRedundancyOptimizer, vacuous: int, divide: bool) -> None:
        self._zero, self._vacuous, self._divide = zero, vacuous, divide
        self._seen: list[list[torch.Tensor]] = []
        self._pieces: list[list[_Piece]] = []
        self._reducing: list[tuple[Bucket, object]] = []
        self._sending: list[Work] = []
        self._done = 0

    def begin(self, bucket: Bucket) -> None:
        """Begin a pass at its first bucket; at the first that steps, choose owners."""
        if bucket.index() > 0:
            return
        self._reducing.clear()
        self._sending.clear()
        self._done = 0
        if self._pieces:
            self._zero._before_steps()
        elif self._vacuous:
            self._vacuous -= 1
            self._seen.clear()
        else:
            self._choose()
            self._zero._before_steps()

    def _choose(self) -> None:
        zero = self._zero
        sizes = [[x.numel() for x in params] for params in self._seen]
        places = bucket_pieces(sizes, zero.world_size, self._divide)
        owners = {
            x: place.owner
            for params, found in zip(self._seen, places, strict=True)
            for place in found
            for x in params[place.first : place.end]
        }
        zero._begin_overlap(owners)
        self._pieces = [
            [_Piece(place, params, zero._group) for place in found]
            for params, found in zip(self._seen, places, strict=True)
        ]

    def launched(self, bucket: Bucket, outcome: object) -> None:
        if self._pieces:
            self._reducing.append((bucket, outcome))
        else:
            self._seen.append(bucket.parameters())

    def advance(self, end: int) -> None:
        """Step this rank's pieces of the buckets before `end`, and launch their broadcasts."""
        while self._pieces and self._done < end:
            index, self._done = self._done, self._done + 1
            pieces = self._pieces[index]
            rank, group = self._zero.rank, self._zero._group
            if any(piece.owner == rank for piece in pieces):
                gradients = reduced_gradients(*self._reducing[index])
                for piece in pieces:
                    if piece.owner == rank:
                        self._zero.optim.step_params(piece.params, gradients[piece.part])
            for piece in pieces:
                piece.memory.attach()
                work = group.broadcast(piece.memory.flat, piece.owner, async_op=True)
                self._sending.append(require_work(work))

    def finish(self) -> None:
        """Wait until this rank has all values."""
        if self._pieces:
            for work in self._sending:
                work.wait()
            self._reducing.clear()
            self._zero._after_steps()


def reduced_gradients(bucket: Bucket, outcome: Any) -> list[torch.Tensor]:
    """Wait for a hook's outcome, and return the bucket's reduced gradients; raise its error."""
    if isinstance(outcome, LaunchedCall):
        outcome = outcome.work
    torchs = isinstance(outcome, torch.futures.Future)
    value = outcome.wait() if torchs else awaited(outcome)
    if isinstance(value, (list, tuple)):
        value = value[0] if len(value) == 1 else None
    buffer = bucket.buffer()
    if value is None:
        return bucket.gradients()
    if buffer.is_sparse:
        return [value]
    value = as_tensor(value)
    if value.data_ptr() != buffer.data_ptr():
        buffer.copy_(value)
    return bucket.gradients()
