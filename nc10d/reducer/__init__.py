"""Average gradients in buckets, while the backward pass still runs.

    from nc10d.reducer import GradBucket, Reducer

A gradient is an array here: no module knows a framework, and only the group that the caller gives
communicates. Imports go in one direction: `plan`, `schedule`, `settings`, `gradients` and the
packers; then `hooks` and `left_pass`; then `buckets`; then `backward` and `stats`; then `reducer`.
The first use of a name in this package imports its module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nc10d.base.run_to_end import import_to_end

if TYPE_CHECKING:
    from nc10d.reducer.gradients import SparseGradient as SparseGradient
    from nc10d.reducer.hooks.grad_bucket import CommHook as CommHook
    from nc10d.reducer.hooks.grad_bucket import GradBucket as GradBucket
    from nc10d.reducer.logger import Logger as Logger
    from nc10d.reducer.plan import (
        compute_bucket_assignment_by_size as compute_bucket_assignment_by_size,
    )
    from nc10d.reducer.reducer import Reducer as Reducer
    from nc10d.reducer.settings import ReducerOptions as ReducerOptions

_HOME = {
    "CommHook": "hooks.grad_bucket",
    "GradBucket": "hooks.grad_bucket",
    "Logger": "logger",
    "Reducer": "reducer",
    "ReducerOptions": "settings",
    "SparseGradient": "gradients",
    "compute_bucket_assignment_by_size": "plan",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nc10d.reducer' has no attribute {name!r}")
    value = globals()[name] = getattr(import_to_end(f"nc10d.reducer.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
