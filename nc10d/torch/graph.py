"""Find the parameters on which an output does not depend, in the graph that autograd recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, dicts, sets and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def leaves(outputs: Any) -> set[torch.Tensor]:
    """Return the leaves that get gradients in a backward pass from `outputs`."""
    found = {x for x in tensors_in(outputs) if x.is_leaf}
    todo = [x.grad_fn for x in tensors_in(outputs) if x.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)  # a node that accumulates into a leaf has one
        if leaf is not None:
            found.add(leaf)
        new = {behind for behind, _ in node.next_functions if behind is not None} - seen
        seen |= new
        todo.extend(new)
    return found


def unused_in(outputs: Any, params: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of the parameters on which `outputs` do not depend."""
    used = leaves(outputs)
    return [index for index, x in enumerate(params) if x not in used]
