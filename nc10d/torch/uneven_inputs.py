"""DistributedDataParallel in a Join block: what a rank sends that has no batch left.

Contract: in a block, each forward pass of DDP begins with an all_reduce on a vector: element 0 is
the number of ranks that have a batch, element 1 + r the state of rank r. A rank that has joined
makes the same all_reduce, and learns from it which collectives the others will make. The others do
not wait for the result: the Reducer reads the divisor when it launches the first bucket.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from nc10d.api.join import Join, JoinConfig, JoinHook
from nc10d.base.run_to_end import import_to_end
from nc10d.group.host_calls import on_host
from nc10d.ops import MAX
from nc10d.torch.wrapped_module import same_everywhere
from nc10d.work import Work

JOINED, EVALUATES, RECORDS, REDUCES = range(4)
"""A rank's state: no batch left; a forward pass without a graph, with a graph, to be reduced."""


class UnevenInputs(JoinHook):
    """The part that `ddp`, a DistributedDataParallel, has in a Join block."""

    def __init__(self, ddp: Any, divide_by_initial_world_size: bool) -> None:
        # The Join block keeps the module: a cycle would let a dropped module go on reducing.
        self._owner = weakref.ref(ddp)
        self._static = divide_by_initial_world_size
        self._has_sync_bn = ddp._contents.has_sync_bn()
        self._notified: Any = None

    @property
    def _ddp(self) -> Any:
        return self._owner()

    def begin(self, state: int) -> None:
        """Begin this rank's iteration, in which its state is `state`.

        Blocks as `Join.notify_join_context`, and until the last iteration's exchange is over.
        ValueError if the module's own layers communicate, which a rank that has joined cannot.
        """
        if self._has_sync_bn and not self._ddp._join_config.throw_on_early_termination:
            raise ValueError(
                "a rank without a batch cannot take part in SyncBatchNorm: pass "
                "throw_on_early_termination=True to the Join block"
            )
        if self._notified is not None:
            self._notified.wait()
        self._notified = notify(self._ddp)
        self._agree(state)

    def source(self) -> int:
        """Return the last rank that has a batch, whose buffers all ranks get. Blocks."""
        self._agreed.wait()
        return int(np.flatnonzero(self._states[1:])[-1])

    def count(self) -> None:
        """Let the Reducer divide the next pass by the number of ranks that have a batch."""
        self._ddp.reducer.set_forward_pass_work_handle(self._agreed, self._static)

    def _agree(self, state: int) -> None:
        """Start the exchange of all ranks' states."""
        group = self._ddp._group
        self._states = np.zeros(1 + group.size(), np.int64)
        self._states[0] = state != JOINED
        self._states[1 + group.rank()] = state
        agreed = on_host(group).all_reduce(self._states, async_op=True)
        assert agreed is not None, "the call was asynchronous"
        self._agreed: Work = agreed

    def main_hook(self) -> None:
        """Make the collectives in an iteration on the ranks that have a batch."""
        self._agree(JOINED)
        self._agreed.wait()
        self._ddp._shadow(int(self._states[1:].max()), self)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give every rank the parameters and buffers of the last rank that had a batch."""
        if self._notified is not None:
            self._notified.wait()
        group = self._ddp._group
        last = np.array([group.rank() if is_last_joiner else -1], np.int64)
        on_host(group).all_reduce(last, MAX)
        self._ddp._authoritative_rank = int(last[0])
        same_everywhere(group, self._ddp._contents.states(buffers=True), int(last[0]))


def notify(joinable: Any) -> Any:
    """Tell the Join block around a joinable, nc10d's or torch's, that this rank has a batch.

    Return the Work that tells how many ranks have one, or None; see `Join.notify_join_context`.
    """
    config = joinable._join_config
    if config.enable and not isinstance(config, JoinConfig):
        torch_join = import_to_end("torch.distributed.algorithms.join")
        return torch_join.Join.notify_join_context(joinable)
    return Join.notify_join_context(joinable)
