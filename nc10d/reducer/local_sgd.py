"""Post-local SGD: after some passes, gradients are averaged among neighbours only, or not at all.

Contract: as every hook. Whoever uses it averages the parameters themselves over all ranks now and
then, after a step of the optimizer (`average_parameters`). Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD" (2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nc10d.ops import AVG, Array
from nc10d.reducer.hooks import GradBucket, PassHook, allreduce_hook, noop_hook
from nc10d.work import Future, Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup


class PostLocalSGDState:
    """The state of `post_localSGD_hook`.

    The first `start_localSGD_iter` passes average over `process_group`, those after it over
    `subgroup` (the ranks of a host, as a rule), or not at all without
    `post_local_gradient_allreduce`.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if subgroup is None and post_local_gradient_allreduce:
            raise ValueError("post-local SGD needs a subgroup, or no gradient reduction at all")
        self.process_group = process_group
        self.subgroup = subgroup if post_local_gradient_allreduce else None
        self.passes = PassHook(start_localSGD_iter)


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Work | Future[Array]:
    """Average the bucket over all ranks at first, over the subgroup later."""
    if not state.passes.begun(bucket):
        return allreduce_hook(state.process_group, bucket)
    if state.subgroup is None:
        return noop_hook(None, bucket)
    return allreduce_hook(state.subgroup, bucket)


def average_parameters(parameters: Sequence[Array], group: ProcessGroup) -> None:
    """Average parameters over the ranks of a group, in place; blocks until all ranks have called.

    One submission, however many there are.
    """
    with group.coalescing_manager():
        for parameter in parameters:
            group.all_reduce(parameter, AVG)
