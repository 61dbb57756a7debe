"""A whole training step in a CUDA graph: gradient, NCCL's all_reduce, Adam with its step count.

The step's kernels are Numba's, for a quadratic loss whose minimum differs from rank to rank. Over
the emulator, which runs no kernels, functions in Python stand in for them; it also counts how often
the host waits for the device.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from device_ranks import device

from nc10d import cuda
from nc10d.cuda.device_kernels import capability, load_kernel
from nc10d.cuda.driver import call, driver
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG

COUNT, STEPS = 257, 20
LR, BETA1, BETA2, EPS = 0.05, 0.9, 0.999, 1e-8
THREADS = 128
FIRST = np.array([0, 1, 1], np.float32)
Floats = np.ndarray[Any, np.dtype[np.float32]]


def gradient_on_host(p: Floats, target: Floats, g: Floats, step: Floats) -> None:
    """g = p - target. `step` has the step's number n, and beta1 ** n, beta2 ** n."""
    step += [1, 0, 0]
    step *= [1, BETA1, BETA2]
    g[:] = p - target


def adam_on_host(p: Floats, g: Floats, m: Floats, v: Floats, step: Floats) -> None:
    """Step p by Adam (Kingma and Ba, 2015, algorithm 1); the step's number is on the device."""
    m[:] = BETA1 * m + (1 - BETA1) * g
    v[:] = BETA2 * v + (1 - BETA2) * g * g
    p -= LR / (1 - step[1]) * m / (np.sqrt(v / (1 - step[2])) + EPS)


def after_steps(targets: list[Floats], steps: int) -> Floats:
    """Return the parameters after some steps, by NumPy."""
    p, g, m, v = (np.zeros(COUNT, np.float32) for _ in range(4))
    step = FIRST.copy()
    for _ in range(steps):
        gradient_on_host(p, np.mean(targets, axis=0), g, step)
        adam_on_host(p, g, m, v, step)
    return p


def a_captured_training_step_reads_nothing(group: ProcessGroup) -> None:
    """The replayed steps train as NumPy does, and the host neither reads nor waits meanwhile."""
    mine = device(group)
    targets = [np.random.default_rng(rank).normal(size=COUNT) for rank in range(group.size)]
    with cuda.on_device(mine):
        p, g, m, v = (cuda.zeros(COUNT, device=mine) for _ in range(4))
        step = cuda.to_device(FIRST, mine)
        target = cuda.to_device(targets[group.rank].astype(np.float32), mine)
        stream = cuda.Stream(mine)

        def train() -> None:
            launch("gradient", stream, p, target, g, step)
            group.all_reduce(g, AVG)
            launch("adam", stream, p, g, m, v, step)

        with cuda.stream(stream):
            train()  # compiles, and forms the communicator
            stream.synchronize()
            backend: Any = group.backend("cuda")
            backend.device_group.pending.sweep()  # or the watchdog asks for the end meanwhile
            group.barrier()
            with host_waits() as in_capture:
                call("cuStreamBeginCapture", stream.handle, thread_local())
                train()
                graph = call("cuStreamEndCapture", stream.handle)
            runs = call("cuGraphInstantiate", graph, 0)
            with host_waits() as in_replay:
                for _ in range(STEPS):
                    call("cuGraphLaunch", runs, stream.handle)
            stream.synchronize()
        assert (in_capture(), in_replay()) == (0, 0), "a step waits for the device"
        found = cuda.to_host(p)
    expected = after_steps([x.astype(np.float32) for x in targets], 1 + STEPS)
    assert float(cuda.to_host(step)[0]) == 1 + STEPS
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


def thread_local() -> Any:
    return driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


WAITS = (
    *("cuMemcpyDtoH", "cuMemcpyDtoHAsync", "cuCtxSynchronize", "cuStreamSynchronize"),
    *("cuStreamQuery", "cuEventSynchronize", "cuEventQuery"),
)


@contextmanager
def host_waits() -> Iterator[Callable[[], int]]:
    """Count the calls in a block that read from the device, wait for it, or ask it.

    The emulator counts them itself. Elsewhere those of nc10d by cuda.bindings are counted.
    """
    counter = emulated("cuemuHostWaits")
    if counter is not None:
        counter.restype = ctypes.c_ulong
        before = counter()
        found: list[int] = []
        yield lambda: found[0]
        found.append(counter() - before)
        return
    binding, made = driver(), dict.fromkeys(WAITS, 0)
    originals = {name: getattr(binding, name) for name in WAITS}

    def counted(name: str) -> Callable[..., Any]:
        def wait(*arguments: Any) -> Any:
            made[name] += 1
            return originals[name](*arguments)

        return wait

    for name in WAITS:
        setattr(binding, name, counted(name))
    try:
        yield lambda: sum(made.values())
    finally:
        for name in WAITS:
            setattr(binding, name, originals[name])


def emulated(name: str) -> Any:
    """Return a function of the emulated libcuda, None on a real driver."""
    driver()
    return getattr(ctypes.CDLL("libcuda.so.1"), name, None)


def launch(name: str, stream: cuda.Stream, *arrays: cuda.DeviceArray) -> None:
    """Launch a kernel on a stream, an element a thread."""
    values: list[int] = []
    for x in arrays:  # a one-dimensional array of Numba's: two owners, count, element, data
        count = x.shape[0]
        values += [0, 0, count, 4, x.address, count, 4]
    shape = -(-arrays[0].shape[0] // THREADS), 1, 1, THREADS, 1, 1, 0
    types = (ctypes.c_int64,) * len(values)
    kernel = kernels(stream.device)[name]
    call("cuLaunchKernel", kernel, *shape, stream.handle, (tuple(values), types), 0)


@functools.cache
def kernels(device: int) -> dict[str, Any]:
    """Return the loaded kernels; register their twins with an emulator."""
    from numba import cuda as on
    from numba import float32, void

    register = emulated("cuemuRegisterKernel")
    if register is not None:
        for name, (twin, count) in TWINS.items():
            sizes = (ctypes.c_uint * (WORDS * count))(*[8] * (WORDS * count))
            assert register(name.encode(), twin, WORDS * count, sizes) == 0

    def gradient(p, target, g, step):  # type: ignore[no-untyped-def]
        i = on.grid(1)
        if i == 0:
            step[0] += 1
            step[1] *= BETA1
            step[2] *= BETA2
        if i < p.size:
            g[i] = p[i] - target[i]

    def adam(p, g, m, v, step):  # type: ignore[no-untyped-def]
        i = on.grid(1)
        if i < p.size:
            m[i] = BETA1 * m[i] + (1 - BETA1) * g[i]
            v[i] = BETA2 * v[i] + (1 - BETA2) * g[i] * g[i]
            root = math.sqrt(v[i] / (1 - step[2]))
            p[i] -= LR / (1 - step[1]) * m[i] / (root + EPS)

    made = {}
    for body in (gradient, adam):
        array = float32[::1]
        signature = void(*[array] * TWINS[body.__name__][1])
        ptx, _ = on.compile_ptx(body, signature, device=False, cc=capability(device))
        made[body.__name__] = load_kernel(device, ptx)
    return made


TWIN = ctypes.CFUNCTYPE(None, *[ctypes.POINTER(ctypes.c_uint)] * 2, ctypes.POINTER(ctypes.c_void_p))
WORDS, DATA, LENGTH = 7, 4, 5
"""The parameters of a one-dimensional array of Numba's, its address and its length among them."""


def twin_of(body: Callable[..., None], count: int) -> Any:
    """Return a kernel's twin: the same in NumPy, on the memory of its arrays."""

    def run(_grid: Any, _block: Any, args: Any) -> None:
        def word(index: int) -> int:
            return int(ctypes.c_uint64.from_address(args[index]).value)

        places = [(word(WORDS * k + DATA), word(WORDS * k + LENGTH)) for k in range(count)]
        body(
            *[
                np.frombuffer((ctypes.c_char * (4 * length)).from_address(at), np.float32)
                for at, length in places
            ]
        )

    return TWIN(run)


TWINS = {"gradient": (twin_of(gradient_on_host, 4), 4), "adam": (twin_of(adam_on_host, 5), 5)}
