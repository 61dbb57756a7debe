"""Train on ranks that have different numbers of batches: the Join context manager of c10d.

    with Join([model, optimizer]):
        for batch in batches:           # another number of batches on each rank
            optimizer.step(model(batch))

Contract: a joinable calls `Join.notify_join_context(self)` before the collectives of an iteration.
A rank that has left its loop joins: it makes the same collectives through the joinables' hooks,
with data that change nothing, until every rank has joined. The design follows
torch.distributed.algorithms.join, but knows only groups and numbers, no framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from nc10d.errors import DistError
from nc10d.group.collectives import Collectives
from nc10d.group.host_calls import on_host
from nc10d.group.process_group import ProcessGroup
from nc10d.work import Work


class JoinConfig(NamedTuple):
    """How a joinable takes part in the Join block around it; outside of a block it is disabled."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


class JoinHook:
    """A joinable's collectives on a rank that has no batch left; both do nothing here."""

    is_followed = False
    """Whether a joinable behind this in the block uses its results: an optimizer the gradients."""

    def main_hook(self) -> None:
        """Make an iteration's collectives; called once for each iteration of other ranks."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make the collectives after the last iteration; called once, when all ranks have joined.

        `is_last_joiner` says whether this rank is among the last that had a batch.
        """


class Joinable(ABC):
    """An object whose iterations communicate, and that can do so without a batch.

    A subclass calls this constructor, and `Join.notify_join_context(self)` before the collectives
    in each iteration.
    """

    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: object) -> JoinHook:
        """Return a hook for a Join block; `kwargs` are Join's keyword arguments."""

    @property
    @abstractmethod
    def join_device(self) -> Any:
        """The device for the joinable's collectives."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group for the joinable's collectives."""


class EarlyTermination(RuntimeError):
    """A rank has no batch left, in a Join block with `throw_on_early_termination`."""


class Join:
    """A block in which ranks have different numbers of iterations.

    The joinables have one device and one group, and every rank lists the same in the same order.
    The block's end waits until all ranks have joined. `kwargs` go to each `join_hook`. With
    `throw_on_early_termination`, every rank raises a RuntimeError (EarlyTermination) as soon as a
    rank has no batch left. With `enable` False the block does nothing: for ranks with equal inputs.

    If an exception leaves the block on some rank, the other ranks cannot go on: they raise Aborted
    with its text, and the group is of no use any more.

    ValueError without joinables, or if they differ in device or group; TypeError for an object that
    is not joinable, or a group that is not nc10d's.
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: object,
    ) -> None:
        self._joinables = list(joinables)
        if not self._joinables:
            raise ValueError("Join needs at least one joinable")
        for x in self._joinables:
            if not (hasattr(x, "join_hook") and hasattr(x, "_join_config")):
                raise TypeError(f"{type(x)} is not joinable, or calls no Joinable constructor")
        self._enable, self._throw = enable, throw_on_early_termination
        self._group = _same("join_process_group", self._joinables, own_group)
        _same("join_device", self._joinables, str)
        self._hooks = [x.join_hook(**kwargs) for x in self._joinables]
        for hook in self._hooks[:-1]:
            hook.is_followed = True
        for index, x in enumerate(self._joinables):
            x._join_config = JoinConfig(enable, throw_on_early_termination, index == 0)

    def __enter__(self) -> None:
        """Begin the block; sends nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._enable and error is None:
                self._join()
            elif self._enable and not isinstance(error, DistError | EarlyTermination):
                self._group.abort(error)
        finally:
            for x in self._joinables:
                x._join_config = JoinConfig()

    def _join(self) -> None:
        """Make the other ranks' collectives until no rank has a batch."""
        last = True
        while _having_batches(self._group):
            if self._throw:
                raise EarlyTermination(f"Rank {self._group.rank} exhausted all inputs.")
            last = False
            for hook in self._hooks:
                hook.main_hook()
        for hook in self._hooks:
            hook.post_hook(last)

    @staticmethod
    def notify_join_context(joinable: Any) -> Work | None:
        """Tell the other ranks that this rank has a batch; call it before each iteration.

        Returns the Work of an all_reduce whose result, an int64 array with a single element, is the
        number of ranks that have one. Only the block's first joinable communicates; None for the
        others, and outside of a block. Blocks only with `throw_on_early_termination`, and raises
        a RuntimeError then if a rank has joined.
        """
        config = joinable._join_config
        if not (config.enable and config.is_first_joinable):
            return None
        group = own_group(joinable.join_process_group)
        count = np.ones(1, np.int64)
        work = on_host(group).all_reduce(count, async_op=True)
        assert work is not None, "the call was asynchronous"
        if config.throw_on_early_termination:
            work.wait()
            if count[0] < group.size():
                raise EarlyTermination(
                    "Detected at least one rank that exhausted inputs. Throwing across all ranks."
                )
        return work


def _having_batches(group: ProcessGroup) -> int:
    """Return how many ranks have a batch; this rank has none."""
    count = np.zeros(1, np.int64)
    on_host(group).all_reduce(count)
    return int(count[0])


def _same(attribute: str, joinables: Sequence[object], form: Callable[[Any], object]) -> Any:
    first, *others = [form(getattr(x, attribute)) for x in joinables]
    for other in others:
        if other != first:
            raise ValueError(f"joinables differ in {attribute}: {first} and {other}")
    return first


groups_of_others: list[Callable[[Any], ProcessGroup | None]] = []
"""Functions that return nc10d's group under another library's group, or None."""


def own_group(group: object) -> ProcessGroup:
    """Return an nc10d group itself, or the nc10d group under another library's group."""
    if isinstance(group, Collectives):
        return group  # type: ignore[return-value]
    for function in groups_of_others:
        if (found := function(group)) is not None:
            return found
    raise TypeError(f"join_process_group must be a group of nc10d's, got {type(group)}")
