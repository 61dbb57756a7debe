"""The members of a group: some ranks of the job, in order, each with a rank in the group. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.arrays.arguments import integer
from nc10d.base.callable_values import CallableInt, CallableStr

_MOST_NAMED = 8


class Members:
    """Global `ranks` in the group's order; `rank` is this process's rank in the group.

    `name`, `rank` and `size` can be called too, as c10d's methods: `group.rank()`. `numbers` maps a
    global rank to its rank in the group. `reducers` counts the Reducers made on the group so far,
    the same number on all members.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.name = CallableStr(name)
        self.ranks = tuple(integer("ProcessGroup", "ranks", member) for member in ranks)
        self.rank = CallableInt(integer("ProcessGroup", "rank", rank))
        self.size = CallableInt(len(self.ranks))
        self.reducers = 0
        self.numbers = {member: index for index, member in enumerate(self.ranks)}

    @property
    def group_name(self) -> str:
        """The name as a plain str."""
        return self.name()

    def group_rank(self, global_rank: int) -> int:
        """Return the rank in this group of a global rank; ValueError if it is not a member."""
        if type(global_rank) is not int:  # the table would accept 1.0 as 1
            global_rank = integer("group_rank", "global_rank", global_rank)
        index = self.numbers.get(global_rank)
        if index is None:
            message = f"global rank {global_rank} is not in group {self.name!r} of ranks"
            ranks = str([*self.ranks])
            if self.size > _MOST_NAMED:
                ranks = f"{[*self.ranks[: _MOST_NAMED - 1]]}... ({self.size})"
            raise ValueError(f"{message} {ranks}")
        return index

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a rank in this group; ValueError if there is none."""
        group_rank = integer("global_rank", "group_rank", group_rank)
        if not 0 <= group_rank < self.size:
            message = f"group {self.name!r} has ranks 0 to {self.size - 1}, got {group_rank}"
            raise ValueError(message)
        return self.ranks[group_rank]
