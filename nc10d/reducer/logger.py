"""DDP logging data in c10d's fields: a Reducer's options and the times of its passes.

Contract: the Reducer notifies the Logger after each pass, in the thread that finishes the pass. The
Logger does not block. It samples the first ten passes and then each hundredth pass, as c10d does,
unless the user sets another rate. `iteration` is the pass's number, from 0. Durations are in ns,
moments in ns since 1970. The caller adds fields about a framework's module.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator

from nc10d.base.deadline import monotonic_ns, time_of_day_ns
from nc10d.reducer.plan import ReducePlan
from nc10d.reducer.reducer import Reducer

FIRST = 10
"""Number of passes at the start that are all sampled."""
SAMPLE_RATE = 100
"""The number of later passes for each sampled pass."""
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
"""Environment variables with a field each; its value is "N/A" if the variable is not set."""
Fields = dict[str, int | str]


class Logger:
    """Collects fields about a Reducer; `more` are the caller's own, such as `module_name`."""

    def __init__(self, reducer: Reducer, **more: int | str) -> None:
        self._reducer = reducer
        self._more = more
        self._rate = SAMPLE_RATE
        self._samples = 0
        self._sums: Counter[str] = Counter()
        self._last: Fields = {}
        self._errors: Fields = {}
        self._epoch = time_of_day_ns() - monotonic_ns()
        self._initial = reducer.plan
        reducer.set_logger(self)

    def note(self, **more: int | str) -> None:
        """Add the caller's fields."""
        self._more.update(more)

    def set_sample_rate(self, rate: int) -> None:
        """Sample a pass in every `rate` after the first ten; ValueError for a rate below 1."""
        if rate < 1:
            raise ValueError(f"the sample rate is a number of passes from 1 on, got {rate}")
        self._rate = rate

    def pass_ended(self) -> None:
        """Sample the pass that has just ended, if a sample is due."""
        reducer = self._reducer
        iteration = reducer.passes - 1
        if iteration >= FIRST and iteration % self._rate:
            return
        durations, moments = reducer.durations(), reducer.times.moments()
        self._samples += 1
        self._sums.update(durations)
        times = zip(reducer.specs, reducer.times.ready, strict=True)
        unused = [spec for spec, at in times if not at]
        self._last = {
            **durations,
            **{f"avg_{name}": self._sums[name] // self._samples for name in durations},
            **{moment.value: at and at + self._epoch for moment, at in moments.items()},
            "iteration": iteration,
            "unused_parameter_size": sum(spec.nbytes for spec in unused),
            "prev_iteration_grad_ready_order_indices": _words(_order(reducer.times.ready), ", "),
        }

    def failed(self, error: BaseException) -> None:
        """Report a pass's error, or the caller's, in the fields `has_error` and `error`."""
        self._errors = {"has_error": 1, "error": str(error)}

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that leaves the with-block."""
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise

    def data(self) -> Fields:
        """Return all fields; fields about passes are missing until the first sample.

        `has_error` and `error` are missing until an error.
        """
        return {**self._fixed(), **self._rebuilt(), **self._last, **self._errors, **self._more}

    def _fixed(self) -> Fields:
        reducer, group = self._reducer, self._reducer.group
        return {
            "world_size": group.size,
            "rank": group.rank,
            "backend_name": getattr(group, "backend_name", type(group).__name__),
            **{name.lower(): os.environ.get(name, "N/A") for name in VARIABLES},
            "dtypes": _words(sorted({spec.dtype.label for spec in reducer.specs}), ", "),
            "num_parameter_tensors": len(reducer.specs),
            "total_parameter_size_bytes": sum(spec.nbytes for spec in reducer.specs),
            "bucket_cap_bytes": reducer.settings.cap_bytes,
            "bucket_sizes": _sizes(self._initial),
            "find_unused_parameters": int(reducer.settings.find_unused),
            "static_graph": int(reducer.settings.static),
            "comm_hook": reducer.hook_name,
        }

    def _rebuilt(self) -> Fields:
        plan, done = self._reducer.plan, self._reducer.rebuilt
        return {
            "has_rebuilt_buckets": int(done),
            "rebuilt_bucket_sizes": _sizes(plan) if done else "",
            "rebuilt_per_bucket_param_indices": _params(plan) if done else "",
            "num_buckets_reduced": len(plan.buckets) - self._reducer.skipped_buckets,
        }


def _order(ready: Iterable[int]) -> list[int]:
    """Return the parameters whose gradients arrived, in arrival order."""
    return [param for at, param in sorted((at, param) for param, at in enumerate(ready)) if at]


def _words(items: Iterable[object], between: str) -> str:
    return between.join(map(str, items))


def _sizes(plan: ReducePlan) -> str:
    return _words((bucket.count * bucket.dtype.itemsize for bucket in plan.buckets), ", ")


def _params(plan: ReducePlan) -> str:
    return _words((_words(bucket.params, " ") for bucket in plan.buckets), ", ")
