"""The optimizer's state for a fully sharded module: whole and by name, or a rank's own.

    whole = full_optim_state_dict(model, optimizer)             # on rank 0
    own = scatter_full_optim_state_dict(whole, model)           # under any number of ranks
    optimizer.load_state_dict(own)

Contract: a whole state has an entry for each parameter that has a state, by the parameter's name in
the module before `fully_shard`; so other units, ranks and a plain optimizer understand it. Names
and meanings are those of torch's FullyShardedDataParallel. A whole state's tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from nc10d.api.objects import scatter_object_list
from nc10d.torch.optim.global_state import options_of
from nc10d.torch.sharded.flat import Flat, check_shapes
from nc10d.torch.sharded.fully_shard import FullyShardedModule

State = dict[str, Any]


@torch.no_grad()
def full_optim_state_dict(
    model: FullyShardedModule, optim: torch.optim.Optimizer, rank0_only: bool = True
) -> State:
    """Return the whole state of `optim`, an optimizer for `model.parameters()`.

    All ranks call, and block. With `rank0_only`, ranks other than 0 get an empty dict.
    """
    keeping = model._group.rank == 0 or not rank0_only
    state: State = {}
    for flat in model.flats():
        row = optim.state.get(flat.shard, {})
        wholes = {key: _whole(flat, value, rank0_only) for key, value in sorted(row.items())}
        if not keeping or not row:
            continue
        names = [entry.name for entry in flat.layout.entries]
        parts: dict[str, State] = {name: {} for name in names}
        for key, value in wholes.items():
            divided = _is_divided(flat, row[key])
            split = flat.layout.split(value) if divided else dict.fromkeys(names, value)
            for name in names:
                parts[name][key] = split[name].clone() if divided else deepcopy(value)
        state.update(parts)
    if not keeping:
        return {}
    flat_of = {flat.shard: flat for flat in model.flats()}
    groups = []
    for group in optim.param_groups:
        held = {e.name for x in group["params"] for e in flat_of[x].layout.entries}
        listed = [name for name in model.param_names if name in held]
        groups.append({**deepcopy(options_of(group)), "params": listed})
    ordered = {name: state[name] for name in model.param_names if name in state}
    return {"state": ordered, "param_groups": groups}


def _is_divided(flat: Flat, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shard.shape and value.dim() > 0


def _whole(flat: Flat, value: Any, rank0_only: bool) -> Any:
    if not _is_divided(flat, value):
        return value
    group, size = flat.group, flat.layout.size
    if not rank0_only:
        return flat.whole(value).cpu()
    whole = value.new_empty(size * flat.layout.length) if group.rank == 0 else None
    group.gather_single(value.contiguous(), whole, 0)
    return None if whole is None else whole.cpu()


def shard_full_optim_state_dict(full_optim_state_dict: State, model: FullyShardedModule) -> State:
    """Return this rank's part of a whole state, for its optimizer's `load_state_dict`.

    Every rank calls with the whole state; sends nothing. ValueError if the parameters differ from
    the module's, or if a unit's parameters have different numbers of steps or other groups.
    """
    return _share(full_optim_state_dict, model, model._group.rank)


def scatter_full_optim_state_dict(
    full_optim_state_dict: State | None, model: FullyShardedModule
) -> State:
    """Return this rank's part of the whole state that rank 0 has; the other ranks give None.

    All ranks call, and block. ValueError as `shard_full_optim_state_dict`, on rank 0; the others
    then raise a CodecError.
    """
    group = model._group
    mine: list[Any] = [None]
    shares: list[Any] | None = None
    error: ValueError | None = None
    if group.rank == 0:
        try:
            assert full_optim_state_dict is not None
            shares = [_share(full_optim_state_dict, model, r) for r in range(group.size())]
        except ValueError as caught:
            error, shares = caught, [str(caught)] * group.size()
    scatter_object_list(mine, shares, group=group, group_src=0)
    if error is not None:
        raise error
    if isinstance(mine[0], str):
        raise ValueError(f"rank 0: {mine[0]}")
    return mine[0]


def _share(whole: State, model: FullyShardedModule, rank: int) -> State:
    state = whole["state"]
    wanted = {e.name: e.shape for flat in model.flats() for e in flat.layout.entries}
    check_shapes(
        {name: wanted.get(name) for name in state},
        {name: _shape(row, wanted.get(name)) for name, row in state.items()},
    )
    group_of = {name: i for i, g in enumerate(whole["param_groups"]) for name in g["params"]}
    check_shapes(dict.fromkeys(wanted), dict.fromkeys(group_of))
    own: dict[int, State] = {}
    counts = _per_parameter_keys(state, wanted)
    members: list[list[int]] = [[] for _ in whole["param_groups"]]
    for index, flat in enumerate(model.flats()):
        names = [entry.name for entry in flat.layout.entries]
        homes = {group_of[name] for name in names}
        if len(homes) > 1:
            raise ValueError(
                f"{names[0]} and other parameters of its unit are in different parameter groups: "
                "choose other units, or make the state's groups alike"
            )
        members[homes.pop()].append(index)
        rows = {name: state[name] for name in names if name in state}
        if rows:
            own[index] = _joined(flat, rows, counts, rank)
    order = [index for group in members for index in group]
    place = {index: i for i, index in enumerate(order)}
    groups = [
        {**deepcopy(options_of(group)), "params": [place[i] for i in found]}
        for group, found in zip(whole["param_groups"], members, strict=True)
    ]
    return {"state": {place[i]: row for i, row in sorted(own.items())}, "param_groups": groups}


def _shape(row: Mapping[str, Any], default: Any) -> Any:
    """Return the shape that a parameter's state has; the default if there are only numbers."""
    shapes = {x.shape for x in row.values() if isinstance(x, torch.Tensor) and x.dim()}
    return shapes.pop() if len(shapes) == 1 else default


def _per_parameter_keys(state: Mapping[str, State], shapes: Mapping[str, torch.Size]) -> set[str]:
    """Return the keys in the optimizer's state that have one number a parameter, such as `step`."""
    # A 0-dimensional parameter has one number under every key. If all are so, only names tell.
    counts = {"step", "mu_product", "eta", "mu"}  # torch's Adam, NAdam and ASGD
    rows = [(bool(shapes[name]), key, x) for name, row in state.items() for key, x in row.items()]
    elements = {key for _, key, x in rows if isinstance(x, torch.Tensor) and x.dim()}
    return (counts | {key for has_shape, key, _ in rows if has_shape}) - elements


def _joined(flat: Flat, rows: Mapping[str, State], counts: set[str], rank: int) -> State:
    """Return the state for a rank's shard from its parameters' state."""
    found: State = {}
    for key in sorted(set().union(*rows.values())):
        values = {name: row[key] for name, row in rows.items() if key in row}
        tensors = {
            name: x
            for name, x in values.items()
            if isinstance(x, torch.Tensor) and (x.dim() or key not in counts)
        }
        if tensors:
            like = next(iter(tensors.values()))
            found[key] = flat.own(flat.layout.joined(tensors, like), rank).clone()
            continue
        first = next(iter(values.values()))
        if any(value != first for value in values.values()):
            raise ValueError(
                f"parameters of the unit of {next(iter(rows))} differ in {key!r} of their state: "
                "they can't share a flat parameter; choose other units"
            )
        found[key] = deepcopy(first)
    return found


def rekey_optim_state_dict(
    optim_state_dict: State, optim_state_key_type: Any, model: torch.nn.Module
) -> State:
    """Return a whole state with keys as names or as a plain optimizer's numbers.

    `optim_state_key_type` is "name" or "id", or torch's OptimStateKeyType. Numbers count the
    parameters in the state's groups, in order. `model` is the fully sharded module, or a plain
    module with the same names, whose plain optimizer has a single group with `model.parameters()`.
    """
    kind = getattr(optim_state_key_type, "name", str(optim_state_key_type)).lower()
    if kind.removeprefix("param_") not in ("name", "id"):
        raise ValueError(f"optim_state_key_type is 'name' or 'id', got {optim_state_key_type!r}")
    groups = optim_state_dict["param_groups"]
    if isinstance(model, FullyShardedModule):
        names = model.param_names
    else:
        names = [name for name, _ in model.named_parameters()]
    listed = [key for group in groups for key in group["params"]]
    if kind.endswith("id"):
        key_of: dict[object, object] = {name: index for index, name in enumerate(listed)}
    elif sorted(listed) != list(range(len(names))):
        raise ValueError(f"the state has {len(listed)} parameters, the module {len(names)}")
    else:
        key_of = dict(enumerate(names))
    return {
        "state": {key_of[key]: row for key, row in optim_state_dict["state"].items()},
        "param_groups": [{**g, "params": [key_of[key] for key in g["params"]]} for g in groups],
    }
