"""The passes of a step as leaves of a fixed tree: a rank has a pass for each of its leaves.

| pass | what happens to a bucket |
|---|---|
| each but the rank's last | the gradients join those before, as in a binary counter |
| the last | they join, too; the ranks' subtrees are combined, and the bucket gets the mean |

So a step's means have the same bits on any number of ranks, if the leaves' gradients have. A rank
keeps at most log2(leaves) + 1 arrays as long as a bucket, in float32 for narrower floats.
"""

from __future__ import annotations

from nc10d.arrays.dtypes import element_of, scalar
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, Array
from nc10d.ops.leaf_tree import leaf_tree
from nc10d.reducer.hooks.grad_bucket import GradBucket
from nc10d.reducer.leaf_sums import HeldSums, LeafSum
from nc10d.work import Future


class LeafPasses:
    """A comm hook that averages over `leaves`; `done` counts this rank's leaves in the step."""

    def __init__(self, group: ProcessGroup, leaves: int) -> None:
        self.leaves, self.mine = leaves, leaf_tree(leaves, group.rank, group.size).mine
        self.done = 0
        self.steps = 0
        """The number of steps that have ended."""
        self._held: dict[int, HeldSums] = {}

    @property
    def is_last(self) -> bool:
        """Whether the current or next pass is this rank's last in the step."""
        return self.done + 1 == len(self.mine)

    def end_pass(self) -> None:
        """Go on with the next leaf, or with the next step's first."""
        self.steps += self.is_last
        self.done = (self.done + 1) % len(self.mine)

    def reset(self) -> None:
        """Begin the step again, with other buckets or after an error."""
        self.done = 0
        self._held.clear()

    def __call__(self, group: ProcessGroup, bucket: GradBucket) -> Future[Array]:
        """Add a bucket's gradients; with the last leaf, blocks until all ranks' are combined."""
        memory, index = bucket.on_host(), bucket.index()
        held = self._held.get(index)
        if held is None:
            dtype, where = scalar(element_of(memory.dtype)), (group.rank, group.size)
            sums = LeafSum(*where, self.leaves, AVG, dtype, bucket.purpose)
            held = self._held[index] = HeldSums(group, sums)
        held.add(memory, keep=not self.is_last)
        if self.is_last:
            held.reduce(memory)
        done: Future[Array] = Future()
        done.set_result(bucket.buffer())
        return done
