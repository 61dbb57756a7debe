"""DistributedDataParallel's arguments about buckets, as options for the Reducer.

Contract: pure. Errors are ValueErrors that name the argument, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nc10d.reducer.plan import BUCKET_BYTES, FIRST_BUCKET_BYTES
from nc10d.reducer.settings import ReducerOptions

_MIB = 1 << 20


def size_limits(cap_mb: float | None, caps_mb: Sequence[float] | None) -> tuple[int, ...]:
    """Return bucket limits in bytes, the first bucket's first; as in torch."""
    if caps_mb:
        if min(caps_mb) <= 0:
            raise ValueError(f"bucket_cap_mb_list must have positive sizes, got {list(caps_mb)}")
        return tuple(int(cap * _MIB) for cap in caps_mb)
    if cap_mb is None:
        return FIRST_BUCKET_BYTES, BUCKET_BYTES
    if not cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive, got {cap_mb}")
    cap = int(cap_mb * _MIB)
    return min(cap, FIRST_BUCKET_BYTES), cap


def delayed_options(
    trained: Mapping[str, torch.Tensor],
    named: Iterable[tuple[str, torch.Tensor]] | None,
    until: torch.Tensor | None,
) -> ReducerOptions:
    """Return the Reducer's options for `delay_all_reduce_named_params` and its partner."""
    if named is None and until is None:
        return {}
    if named is None or until is None:
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce go together: give both"
        )
    pairs = list(named)
    place = {id(x): index for index, x in enumerate(trained.values())}
    missing = [name for name, x in pairs if x.requires_grad and id(x) not in place]
    if missing or id(until) not in place:
        what = missing[0] if missing else "param_to_hook_all_reduce"
        raise ValueError(f"{what} is no parameter of the module that it trains")
    delayed = [place[id(x)] for _, x in pairs if id(x) in place]
    return {"delayed": delayed, "delayed_until": place[id(until)]}
