"""Post-local SGD: after some passes, gradients are averaged over a subgroup only, or not at all.

Contract: as every hook. The user also averages the parameters over all ranks at intervals, after an
optimizer step (`average_parameters`). Source: Lin et al., "Don't Use Large Mini-Batches, Use Local
SGD" (2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from nc10d.arrays.buffer import as_buffer
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, Array
from nc10d.reducer.hooks import GradBucket, allreduce_hook, noop_hook
from nc10d.reducer.hooks.grad_bucket import PassCounter
from nc10d.reducer.packing import divided
from nc10d.work import Future, Work


class PostLocalSGDState:
    """The state of `post_localSGD_hook`.

    The first `start_localSGD_iter` passes average over `process_group`; None becomes that of the
    Reducer with which the state is registered. Later passes average over `subgroup` (usually the
    ranks of a host), or not at all if `post_local_gradient_allreduce` is False. ValueError if a
    subgroup is needed and missing.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if subgroup is None and post_local_gradient_allreduce:
            raise ValueError("post-local SGD needs a subgroup, or no gradient reduction at all")
        self.process_group = process_group
        self.subgroup = subgroup if post_local_gradient_allreduce else None
        self.passes = PassCounter(start_localSGD_iter)


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Work | Future[Array]:
    """Average the bucket over all ranks in the first passes, over the subgroup later."""
    if not state.passes.reached(bucket):
        assert state.process_group is not None, "a Reducer has set it"
        return allreduce_hook(state.process_group, bucket)
    if state.subgroup is None:
        return noop_hook(None, bucket)
    return allreduce_hook(state.subgroup, bucket)


def average_parameters(parameters: Sequence[Array], group: ProcessGroup) -> None:
    """Average parameters over a group's ranks, in place; blocks until all ranks have called."""
    # Every rank divides before the sum, which so does not overflow. All reductions are coalesced
    # into one submission.
    with getattr(group, "coalescing_manager", nullcontext)():
        for x in parameters:
            # The group divides memory with gaps, which might overflow at float's limits.
            dense = as_buffer(x).contiguous
            group.all_reduce(x, divided(x, group.size, group.size) if dense else AVG)
