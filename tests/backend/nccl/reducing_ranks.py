"""Laws of a Reducer of device arrays, for the tests beside this file and tools/gpu_check.py.

Every rank runs each function with its group, as in device_ranks. Means of halves are exact in
every type, so results are compared bit for bit.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from device_ranks import device, value
from lone_ranks import held

import nc10d as dist
from nc10d import cuda
from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.registered_memory import registered_zeros
from nc10d.cuda import memory
from nc10d.cuda.driver import call
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import premul_sum
from nc10d.reducer import device_packing, hooks
from nc10d.reducer.gradients import SparseGradient
from nc10d.reducer.hooks import local_sgd, powersgd, quantization

SHAPES = ((3, 4), (7,), (100,), (2, 2, 2), (70_000,))
WHOLE = 1 << 20
"""Bytes of a bucket that holds all of SHAPES."""


def full_of(x: cuda.DeviceArray, number: float) -> cuda.DeviceArray:
    return cuda.to_device(np.full(x.shape, number, np.float32), x.device)


def number(x: Any) -> float:
    """Synchronize the device, and return the value that all elements share."""
    return value(x.reshape((x.buffer.count,)))


def parameters(group: ProcessGroup) -> list[cuda.DeviceArray]:
    return [cuda.zeros(shape, device=device(group)) for shape in SHAPES]


def memories(group: ProcessGroup) -> list[dict[str, Any]]:
    """Return a Reducer's options: its own memory and, with NCCL, registered memory."""
    if not isinstance(group.backend("cuda"), NcclBackend):
        return [{}]
    with cuda.on_device(device(group)):
        return [{}, {"allocate": registered_zeros(group)}]


def a_reducer_averages_gradients_on_devices(group: ProcessGroup) -> None:
    """Gradients lie in their buckets, or in the caller's arrays."""
    with cuda.on_device(device(group)):
        for allocate in memories(group):
            reducer = dist.Reducer(
                parameters(group), group, cap_bytes=64, find_unused_parameters=True, **allocate
            )
            for turn in range(3):
                _a_pass(group, reducer, turn)
        del reducer
        gc.collect()


def _a_pass(group: ProcessGroup, reducer: Any, turn: int) -> None:
    """Pass half of the gradients as arrays; the last parameter is used in the first pass only.

    In later passes its gradient keeps the rank's own values.
    """
    count = len(SHAPES) - bool(turn)
    reducer.zero_grad()
    rest = reducer.gradients[-1]
    rest.fill_from(np.full(rest.shape, 7.0 + group.rank, np.float32))
    reducer.begin(unused=range(count, len(SHAPES)))
    given = [full_of(x, turn + 10 * k + group.rank) for k, x in enumerate(reducer.gradients)]
    for k in reversed(range(count)):
        if k % 2:
            reducer.grad_ready(k, given[k])
        else:
            reducer.gradients[k][...] = given[k]
            reducer.grad_ready(k)
    reducer.finish()
    for k in range(count):
        mean = turn + 10 * k + (group.size - 1) / 2
        assert number(reducer.gradients[k]) == mean
        assert not k % 2 or number(given[k]) == mean
    assert not turn or number(rest) == 7 + group.rank


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the driver calls that move gradients."""
    calls: Counter[str] = Counter()
    modules = (device_packing, memory)

    def counting(name: str, *arguments: Any) -> Any:
        calls[name] += 1
        return call(name, *arguments)

    for module in modules:
        module.call = counting  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        for module in modules:
            module.call = call  # type: ignore[attr-defined]


def moves(calls: Counter[str]) -> tuple[int, int, int]:
    """Return the numbers of kernel launches, of table writes and of copies."""
    names = ("cuLaunchKernel", "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync")
    return tuple(calls[name] for name in names)  # type: ignore[return-value]


def reduced(reducer: Any, given: list[Any] | None) -> tuple[int, int, int]:
    """Run a pass on the caller's arrays, or in place for None; return its moves()."""
    with counted() as calls:
        reducer.begin()
        for k in range(len(SHAPES)):
            reducer.grad_ready(k, *(() if given is None else (given[k],)))
        reducer.finish()
    return moves(calls)


def means_are(reducer: Any, given: list[Any], wanted: float) -> None:
    for k, x in enumerate(given):
        assert (number(reducer.gradients[k]), number(x)) == (wanted + k, wanted + k)


def all_gradients_of_a_bucket_move_by_one_launch(group: ProcessGroup) -> None:
    """A launch packs and a launch unpacks; tables are rewritten only if arrays have moved."""
    reducer = dist.Reducer(parameters(group), group, cap_bytes=WHOLE, first_bytes=WHOLE)
    assert len(reducer.plan.buckets) == 1
    arrays = [
        [full_of(x, 2.0 * group.rank + k) for k, x in enumerate(reducer.gradients)]
        for _ in range(2)
    ]
    mean = group.size - 1.0
    for given, tables in ((arrays[0], 2), (arrays[0], 0), (arrays[1], 2), (arrays[1], 0)):
        assert reduced(reducer, given) == (2, tables, 0)
        means_are(reducer, given, mean)
        for k, x in enumerate(given):
            x.fill_from(np.full(x.shape, 2.0 * group.rank + k, np.float32))


def gradients_in_their_buckets_are_not_moved(group: ProcessGroup) -> None:
    reducer = dist.Reducer(parameters(group), group, cap_bytes=1024)
    for k, gradient in enumerate(reducer.gradients):
        gradient.fill_from(np.full(SHAPES[k], 2.0 * group.rank + k, np.float32))
    assert reduced(reducer, None) == (0, 0, 0)
    means_are(reducer, reducer.gradients, group.size - 1.0)


def hooks_that_cast_do_so_in_the_launch_that_packs(group: ProcessGroup) -> None:
    """Launches pack, widen and unpack; gradients in their buckets need no unpacking."""
    for hook in (hooks.fp16_compress_hook, hooks.bf16_compress_hook):
        for more in memories(group):
            reducer = _with_hook(group, hook, **more)
            for _ in range(2):
                given = [full_of(x, 2.0 * group.rank + k) for k, x in enumerate(reducer.gradients)]
                launches, _, copies = reduced(reducer, given)
                assert (launches, copies) == (3, 0), hook
                means_are(reducer, given, group.size - 1.0)
            for k, gradient in enumerate(reducer.gradients):
                gradient.fill_from(np.full(SHAPES[k], 2.0 * group.rank + k, np.float32))
            launches, _, copies = reduced(reducer, None)
            assert (launches, copies) == (2, 0), hook
            means_are(reducer, reducer.gradients, group.size - 1.0)


def _with_hook(group: ProcessGroup, hook: Any, state: Any = None, **more: Any) -> Any:
    caps = {"cap_bytes": WHOLE, "first_bytes": WHOLE}
    return dist.Reducer(parameters(group), group, hook=hook, state=state, **caps, **more)


def hooks_work_on_devices_as_on_the_cpu(group: ProcessGroup) -> None:
    """Also hooks around hooks, and hooks that read or replace the buffer."""
    later = local_sgd.PostLocalSGDState(group, None, 0, False)
    mean, mine = group.size - 1.0, 2.0 * group.rank
    cases: list[tuple[Any, Any, float]] = [
        (hooks.allreduce_hook, None, mean),
        (hooks.noop_hook, None, mine),
        (hooks.fp16_compress_wrapper(hooks.allreduce_hook), None, mean),
        (hooks.bf16_compress_wrapper(hooks.noop_hook), None, mine),
        (hooks.fp16_compress_wrapper(hooks.bf16_compress_hook), None, mean),
        (local_sgd.post_localSGD_hook, local_sgd.PostLocalSGDState(group, group, 1), mean),
        (local_sgd.post_localSGD_hook, later, mine),
        (_in_another_array, None, mean),
    ]
    for hook, state, wanted in cases:
        reducer = _with_hook(group, hook, state)
        for _ in range(2):
            given = [full_of(x, mine + k) for k, x in enumerate(reducer.gradients)]
            reduced(reducer, given)
            means_are(reducer, given, wanted)


def _in_another_array(group: ProcessGroup, bucket: hooks.GradBucket) -> Any:
    other = bucket.buffer().copy()
    work = hooks.require_work(group.all_reduce(other, dist.AVG, async_op=True))
    return bucket.following(work, lambda value: value()[0])


def hooks_that_need_the_host_say_what_to_use_instead(group: ProcessGroup) -> None:
    """The hook raises before it uses its group. The next pass starts anew."""
    reducer = _with_hook(group, lambda _, bucket: bucket.on_host(), None)
    for _ in range(2):
        reducer.begin()
        for k in range(len(SHAPES) - 1):
            reducer.grad_ready(k)
        expected = rf"computes on the CPU, and bucket 0 is on cuda:{device(group)}: use one"
        with pytest.raises(TypeError, match=expected):
            reducer.grad_ready(len(SHAPES) - 1)
        with pytest.raises(TypeError, match=expected):
            reducer.finish()


def hooks_that_compute_give_the_results_of_the_host(group: ProcessGroup) -> None:
    """PowerSGD and quantisation: bit for bit what the same hook gives for arrays of the host."""
    makers: list[tuple[hooks.CommHook, Callable[[], Any]]] = [
        (quantization.quantization_pertensor_hook, lambda: group),
        (quantization.quantization_perchannel_hook, lambda: group),
        (powersgd.powerSGD_hook, lambda: powersgd.PowerSGDState(group, 2, 2)),
        (powersgd.batched_powerSGD_hook, lambda: powersgd.PowerSGDState(group, 2, 2)),
    ]
    for hook, state in makers:
        random = np.random.default_rng(group.rank)
        there = _with_hook(group, hook, state())
        here = dist.Reducer(
            [np.zeros(shape, np.float32) for shape in SHAPES],
            group,
            hook=hook,
            state=state(),
            first_bytes=WHOLE,
            cap_bytes=WHOLE,
        )
        for _ in range(4):
            given = [random.normal(size=shape).astype(np.float32) for shape in SHAPES]
            own = [cuda.to_device(x, device(group)) for x in given]
            for reducer, gradients in ((here, given), (there, own)):
                reducer.begin()
                for k, x in reversed(list(enumerate(gradients))):
                    reducer.grad_ready(k, x)
                reducer.finish()
            cuda.synchronize(device(group))
            for x, y, z in zip(given, own, there.gradients, strict=True):
                assert np.array_equal(x, cuda.to_host(y))
                assert np.array_equal(x, cuda.to_host(z))


def gradients_that_do_not_fit_are_refused_at_once(group: ProcessGroup) -> None:
    reducer = dist.Reducer(parameters(group), group)
    reducer.begin()
    there = cuda.zeros((24,), device=device(group))
    strided = {**there.__cuda_array_interface__, "shape": (3, 4), "strides": (32, 8)}
    every_other = type("Strided", (), {"__cuda_array_interface__": strided})()
    with pytest.raises(TypeError, match=r"parameter 0 is on cuda:\d, its gradient on cpu"):
        reducer.grad_ready(0, np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="gradient of parameter 0 must be contiguous"):
        reducer.grad_ready(0, every_other)
    for k in range(len(SHAPES)):
        reducer.grad_ready(k)
    with pytest.raises(RuntimeError, match="parameter 1 was marked ready twice"):
        reducer.grad_ready(1, full_of(reducer.gradients[1], 5.0))
    reducer.finish()
    assert {number(x) for x in reducer.gradients} == {0.0}


def rows_of_a_parameter_on_a_device_are_in_host_memory(group: ProcessGroup) -> None:
    here, there = np.zeros(3, np.float32), cuda.zeros((3,), device=device(group))
    reducer = dist.Reducer([here, there], group, expect_sparse=[True, True])
    for _ in range(2):
        reducer.begin()
        for param in range(2):
            rows = SparseGradient(np.full((1, 1), param, np.int64), np.ones(1, np.float32))
            reducer.grad_ready(param, rows)
        reducer.finish()
    found = [x.dense((3,)).tolist() for x in reducer.gradients]
    assert found == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def a_bucket_leaves_behind_every_stream_of_its_gradients(group: ProcessGroup) -> None:
    """Threads produce gradients on blocked streams; no call blocks the host.

    The gradients of `inside` lie in their buckets.
    """
    here = device(group)
    mean, alone = group.size - 1.0, 2.0 * group.rank
    every = range(len(SHAPES))
    cases = (
        (None, mean, [1]),
        (hooks.bf16_compress_hook, mean, [1]),
        (hooks.noop_hook, alone, [1]),
        (hooks.noop_hook, alone, every),
    )
    for hook, wanted, inside in cases:
        reducer = _with_hook(group, hook)
        made = [full_of(x, 2.0 * group.rank + k) for k, x in enumerate(reducer.gradients)]
        given = [full_of(x, -9.0) for x in reducer.gradients]
        reduced(reducer, given)  # allocates and compiles, so that the measured pass does not
        streams = [cuda.Stream(here) for _ in range(3)]
        last = cuda.Stream(here)
        copies, behind = ([full_of(x, 0.0) for x in reducer.gradients] for _ in range(2))
        with cuda.on_device(here):
            reducer.begin()
            with held(*(stream.handle for stream in streams)):
                for k, x in enumerate(given):
                    mine = None if k in inside else x
                    task = _mark_on(streams[k % 3], reducer, k, mine, made[k])
                    thread = threading.Thread(target=task)
                    thread.start()
                    thread.join()
                with cuda.stream(last):
                    reducer.finish()
                for k, gradient in enumerate(reducer.gradients):
                    _queue_copy(copies[k], gradient, last)
                    source = gradient if k in inside else given[k]
                    _queue_copy(behind[k], source, streams[k % 3])
            cuda.synchronize(here)
        for k, copy in enumerate(copies):
            assert (number(copy), number(behind[k])) == (wanted + k, wanted + k)


def _mark_on(
    stream: cuda.Stream, reducer: Any, k: int, given: Any, made: Any
) -> Callable[[], None]:
    """Return a task that writes a gradient on a stream, in place or elsewhere, and marks it."""

    def task() -> None:
        target = reducer.gradients[k] if given is None else given
        with cuda.on_device(made.device), cuda.stream(stream):
            _queue_copy(target, made, stream)
            reducer.grad_ready(k, given)

    return task


def a_hooks_new_buffers_go_when_their_pass_is_over(group: ProcessGroup) -> None:
    """A packer caches the last buffer; all others are freed."""
    seen: list[weakref.ref[Any]] = []

    def hook(mine: ProcessGroup, bucket: hooks.GradBucket) -> Any:
        bucket.set_buffer(bucket.buffer().copy())
        seen.append(weakref.ref(bucket.buffer()))
        return hooks.bf16_compress_hook(mine, bucket)

    reducer = _with_hook(group, hook)
    for _ in range(4):
        given = [full_of(x, 2.0 * group.rank + k) for k, x in enumerate(reducer.gradients)]
        reduced(reducer, given)
        means_are(reducer, given, group.size - 1.0)
        gc.collect()
        assert sum(x() is not None for x in seen) <= 1


def passes_may_have_streams_that_end_with_them(group: ProcessGroup) -> None:
    reducer = _with_hook(group, hooks.bf16_compress_hook)
    for turn in range(4):
        given = [full_of(x, 2.0 * group.rank + k) for k, x in enumerate(reducer.gradients)]
        stream = cuda.Stream(device(group))
        with cuda.stream(stream):
            reduced(reducer, given)
        kept = cuda.Stream(device(group)) if turn % 2 else None
        del stream
        means_are(reducer, given, group.size - 1.0)
        del kept


def doubled(group: ProcessGroup, bucket: hooks.GradBucket) -> Any:
    return hooks.require_work(group.all_reduce(bucket.buffer(), premul_sum(2.0), async_op=True))


def the_pass_after_a_failed_pass_comes_behind_it(group: ProcessGroup) -> None:
    """Later work on the gradients' streams waits for the collectives of the failed pass."""
    mine, failing = device(group), [False]

    def hook(mine: ProcessGroup, bucket: hooks.GradBucket) -> Any:
        if failing[0] and bucket.is_last():
            raise KeyError("the hook's own")
        return doubled(mine, bucket)

    reducer = dist.Reducer(parameters(group), group, hook=hook, cap_bytes=64, first_bytes=64)
    first = reducer.plan.buckets[0].params[0]
    rest = [k for k in reversed(range(len(SHAPES))) if k != first]
    reduced(reducer, None)
    new, early, late = full_of(reducer.gradients[first], 5.0), cuda.Stream(mine), cuda.Stream(mine)
    with cuda.on_device(mine):
        failing[0] = True
        reducer.begin()
        with held(late.handle):
            with cuda.stream(early):
                for k in rest[:-1]:
                    reducer.grad_ready(k)
            with cuda.stream(late):
                reducer.grad_ready(first)
                with pytest.raises(KeyError):
                    reducer.grad_ready(rest[-1])
                with pytest.raises(KeyError):
                    reducer.finish()
            _queue_copy(reducer.gradients[first], new, early)
        cuda.synchronize(mine)
    assert number(reducer.gradients[first]) == 5.0


def the_stream_that_calls_begin_comes_first(group: ProcessGroup) -> None:
    """A bucket's collective runs after the work of the stream that called begin(unused=...)."""
    mine = device(group)
    begins, marks = cuda.Stream(mine), cuda.Stream(mine)

    def hook(group: ProcessGroup, bucket: hooks.GradBucket) -> Any:
        return bucket.following(doubled(group, bucket), noted)

    def noted(value: Callable[[], Any]) -> Any:
        found = value()
        _queue_copy(total, reducer.gradients[1], marks)
        return found

    reducer = _with_hook(group, hook, find_unused_parameters=True)
    new, total = (full_of(reducer.gradients[1], number) for number in (5.0, 0.0))

    def a_pass() -> None:
        with cuda.stream(begins):
            _queue_copy(reducer.gradients[1], new, begins)
            reducer.begin(unused=[1])
        with cuda.stream(marks):
            for k in range(len(SHAPES)):
                if k != 1:
                    reducer.grad_ready(k)
            reducer.finish()

    with cuda.on_device(mine):
        a_pass()  # allocates and compiles
        reducer.zero_grad()
        cuda.synchronize(mine)
        with held(begins.handle):
            a_pass()
        cuda.synchronize(mine)
    assert number(total) == 2 * 5.0 * group.size
    assert number(reducer.gradients[1]) == 5.0  # no rank has used the parameter


def _queue_copy(target: Any, source: Any, stream: cuda.Stream) -> None:
    call("cuMemcpyDtoDAsync", target.address, source.address, source.nbytes, stream.handle)


ANYWHERE = [
    a_reducer_averages_gradients_on_devices,
    all_gradients_of_a_bucket_move_by_one_launch,
    gradients_in_their_buckets_are_not_moved,
    hooks_that_cast_do_so_in_the_launch_that_packs,
    hooks_work_on_devices_as_on_the_cpu,
    hooks_that_need_the_host_say_what_to_use_instead,
    hooks_that_compute_give_the_results_of_the_host,
    gradients_that_do_not_fit_are_refused_at_once,
    rows_of_a_parameter_on_a_device_are_in_host_memory,
    a_hooks_new_buffers_go_when_their_pass_is_over,
    passes_may_have_streams_that_end_with_them,
]
"""Laws for any backend, including backends that block the host to wait for other ranks."""
REDUCING = [
    *ANYWHERE,
    a_bucket_leaves_behind_every_stream_of_its_gradients,
    the_pass_after_a_failed_pass_comes_behind_it,
    the_stream_that_calls_begin_comes_first,
]
