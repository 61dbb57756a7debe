"""A whole optimizer's state and a rank's share of that state, as dicts in torch's form.

Contract: pure functions. In a whole state, parameter i is the i-th in all groups; in a rank's
share, the i-th that the rank owns. So a whole state is that of an optimizer on one process, and
fits any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")
State = dict[str, Any]
_NOT_OPTIONS = {"params", "param_names"}


def options_of(group: Mapping[str, Any]) -> State:
    """Return a parameter group's options, without the parameters."""
    return {name: value for name, value in group.items() if name not in _NOT_OPTIONS}


def copy_options(source: Sequence[State], target: Sequence[State]) -> None:
    """Set groups' options to those of other groups."""
    for old, new in zip(target, source, strict=True):
        old.update(options_of(new))


def owned(values: Sequence[T], owners: Sequence[int], rank: int) -> list[T]:
    """Return the values whose owner is `rank`."""
    return [x for x, owner in zip(values, owners, strict=True) if owner == rank]


def share_of(whole: Mapping[str, Any], owners: Sequence[Sequence[int]], rank: int) -> State:
    """Return a rank's share of a whole state; `owners` has the owners of each group's parameters.

    ValueError if the state belongs to other parameter groups.
    """
    saved = whole["param_groups"]
    found, expected = [len(g["params"]) for g in saved], [len(group) for group in owners]
    if found != expected:
        raise ValueError(
            f"the state has groups of {found} parameters, the optimizer has groups of {expected}: "
            "load it into an optimizer with the groups that it was saved with"
        )
    local, state = count(), {}
    groups = []
    for group, mine in zip(saved, owners, strict=True):
        own = owned(group["params"], mine, rank)
        places = [next(local) for _ in own]
        for place, index in zip(places, own, strict=True):
            # A copy: the tensors in a received state keep the whole message in memory.
            if whole["state"].get(index) is not None:
                state[place] = deepcopy(whole["state"][index])
        groups.append(deepcopy(options_of(group)) | {"params": places})
    return {"state": state, "param_groups": groups}


def merged(shares: Sequence[Mapping[int, T]], owners: Sequence[Sequence[int]]) -> dict[int, T]:
    """Return every parameter's state, if any, in order, from all ranks' states."""
    places = [count() for _ in shares]
    flat = [owner for group in owners for owner in group]
    found = [shares[owner].get(next(places[owner])) for owner in flat]
    return {index: state for index, state in enumerate(found) if state is not None}
