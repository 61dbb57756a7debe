"""Who is in a group: some ranks of the job, in order, and each one's number among them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.arrays.arguments import integer

_MOST_NAMED = 8


class Members:
    """`ranks` are global, in the group's order; `rank` is mine among them, `size` how many.

    `numbers` has the number of each; `reducers` counts the Reducers made on it so far: the same on
    all members.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.name = name
        self.ranks = tuple(integer("ProcessGroup", "ranks", member) for member in ranks)
        self.rank = integer("ProcessGroup", "rank", rank)
        self.size = len(self.ranks)
        self.reducers = 0
        self.numbers = {member: index for index, member in enumerate(self.ranks)}

    def group_rank(self, global_rank: int) -> int:
        """Return the rank in this group of a global rank; ValueError if it is no member."""
        if type(global_rank) is not int:  # as a key of the table, 1.0 would pass for 1
            global_rank = integer("group_rank", "global_rank", global_rank)
        index = self.numbers.get(global_rank)
        if index is None:
            message = f"global rank {global_rank} is not in group {self.name!r} of ranks"
            raise ValueError(f"{message} {_short(self.ranks)}")
        return index

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a rank in this group; ValueError if there is none."""
        group_rank = integer("global_rank", "group_rank", group_rank)
        if not 0 <= group_rank < self.size:
            message = f"group {self.name!r} has ranks 0 to {self.size - 1}, got {group_rank}"
            raise ValueError(message)
        return self.ranks[group_rank]


def _short(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MOST_NAMED:
        return str(list(ranks))
    return f"{list(ranks[: _MOST_NAMED - 1])}... ({len(ranks)})"
