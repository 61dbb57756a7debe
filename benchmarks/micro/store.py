"""Compare TCPStore with torch's, in the same run, in interleaved rounds.

Each library's client calls its own server, which runs in a separate process; figures are medians.
Times are microseconds a call, as the caller sees it. `set` has no answer, so a thousand sets and a
`get` behind them are timed. `wake` is from just before the set to the return of a get in another
process that waited for it, for 1 ms or for 20. All three processes sleep meanwhile: the longer they
sleep, the less of them is left in the caches. `8 clients` are processes that add to the same
counter, in thousand calls a second. `connect` is the making of a client, in microseconds, while
earlier clients stay connected. `ratio` is above 1 where nc10d is ahead. On a machine with other
work, `--best` gives each library's best round instead of its median.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.libraries import make_c10d
from benchmarks.libraries.c10d import HOST

CALLS, CLIENTS = 1000, 8
# Enough for a reproducible median, in about half a second and a second.
WAKES = {0.001: 300, 0.02: 50}
# Some clients take a tenth of a second to connect: a thousand clients, or a second.
CONNECTIONS, CONNECTING = 1000, 1.0
_TIMEOUT = 60.0
# Forked children have both libraries loaded: starting eight is quick.
_FORK = multiprocessing.get_context("fork")

Connect = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement: its name, its unit, and whether less is better."""

    name: str
    unit: str
    measure: Callable[[Connect, int], float]
    less: bool = True

    def best(self, found: list[float]) -> float:
        """Return the best of several measurements."""
        return min(found) if self.less else max(found)


def connector(library: str) -> Connect:
    """Return a function that makes a client of a library's store, given the port."""
    return partial(make_c10d(library).reach, timeout=_TIMEOUT)


@contextlib.contextmanager
def our_server() -> Iterator[int]:
    """Serve in a process, as by default; yield the port."""
    from nc10d.store import TCPStore

    with contextlib.closing(TCPStore(HOST, is_master=True, timeout=_TIMEOUT)) as store:
        yield store.port


@contextlib.contextmanager
def torch_server() -> Iterator[int]:
    """Serve torch's store in a process; yield the port."""
    here, there = _FORK.Pipe()
    child = _FORK.Process(target=_serve_torch, args=(there,))
    child.start()
    try:
        yield here.recv()
    finally:
        here.send(None)
        child.join()


def _serve_torch(pipe: Connection) -> None:
    from torch.distributed import TCPStore

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def per_call(call: Callable[[Any], object]) -> Callable[[Connect, int], float]:
    """Return the measurement of a call, in microseconds."""

    def measure(connect: Connect, port: int) -> float:
        store = connect(port)
        store.set("k", "v")
        store.get("k")
        return _microseconds(lambda: [call(store) for _ in range(CALLS)]) / CALLS

    return measure


def _microseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e6


def time_set(connect: Connect, port: int) -> float:
    """Time sets with a get behind them: the get returns after all of them."""
    store = connect(port)

    def sets() -> None:
        for _ in range(CALLS):
            store.set("k", "v")
        store.get("k")

    return _microseconds(sets) / CALLS


def wake_after(pause: float) -> Callable[[Connect, int], float]:
    """Return the measurement of the time from a set to the return of the get that it wakes.

    The get has waited for about `pause` seconds, in another process. A figure is the median.
    """

    def measure(connect: Connect, port: int) -> float:
        store = connect(port)
        run, count = store.add("runs", 1), WAKES[pause]
        child = _FORK.Process(target=_wait_often, args=(connect, port, run, count))
        child.start()
        times = [_time_wake(store, f"{run}/{{}}/{i}".format, pause) for i in range(count)]
        child.join()
        return statistics.median(times) * 1e6

    return measure


def _time_wake(store: Any, name: Callable[[str], str], pause: float) -> float:
    store.get(name("ready"))
    # The waiter sets this key just before it begins to wait.
    time.sleep(pause)
    started = time.perf_counter()
    store.set(name("go"), "v")
    return float(store.get(name("woke"))) - started


def _wait_often(connect: Connect, port: int, run: int, count: int) -> None:
    store = connect(port)
    for i in range(count):
        store.set(f"{run}/ready/{i}", "")
        store.get(f"{run}/go/{i}")
        store.set(f"{run}/woke/{i}", repr(time.perf_counter()))


def rate_of_clients(connect: Connect, port: int) -> float:
    """Return thousands of adds a second, of all clients together."""
    start, end = _FORK.Barrier(CLIENTS + 1), _FORK.Barrier(CLIENTS + 1)
    children = [
        _FORK.Process(target=_add_often, args=(connect, port, start, end)) for _ in range(CLIENTS)
    ]
    for child in children:
        child.start()
    start.wait(_TIMEOUT)
    took = _microseconds(lambda: end.wait(_TIMEOUT))
    for child in children:
        child.join()
    return CLIENTS * CALLS * 1e3 / took


def _add_often(connect: Connect, port: int, start: Any, end: Any) -> None:
    store = connect(port)
    start.wait(_TIMEOUT)
    for _ in range(CALLS):
        store.add("n", 1)
    end.wait(_TIMEOUT)


def time_connecting(connect: Connect, port: int) -> float:
    """Return the mean microseconds of making a client, in sequence."""
    clients: list[Any] = []
    started = time.perf_counter()
    while len(clients) < CONNECTIONS and time.perf_counter() < started + CONNECTING:
        clients.append(connect(port))
    return (time.perf_counter() - started) * 1e6 / len(clients)


ROWS = (
    Row("get", "us", per_call(lambda store: store.get("k"))),
    Row("wait", "us", per_call(lambda store: store.wait(["k"]))),
    Row("check", "us", per_call(lambda store: store.check(["k"]))),
    Row("add", "us", per_call(lambda store: store.add("n", 1))),
    Row("compare_set", "us", per_call(lambda store: store.compare_set("c", "x", "x"))),
    Row("set", "us", time_set),
    *(Row(f"wake, {pause * 1000:g} ms", "us", wake_after(pause)) for pause in WAKES),
    Row(f"{CLIENTS} clients", "k/s", rate_of_clients, less=False),
    Row("connect", "us", time_connecting),
)


def measure_all(rounds: int, best: bool) -> Iterator[tuple[Row, float, float]]:
    """Yield each row with nc10d's median (or best) and torch's; they take turns."""
    ours, theirs = connector("nc10d"), connector("gloo")
    # torch's server is forked first, while this process has no threads.
    with torch_server() as their_port, our_server() as our_port:
        for row in ROWS:
            found: tuple[list[float], list[float]] = ([], [])
            for number in range(rounds):
                sides = [(found[0], ours, our_port), (found[1], theirs, their_port)]
                for times, connect, port in sides[:: 1 if number % 2 else -1]:
                    times.append(row.measure(connect, port))
            summary = row.best if best else statistics.median
            yield row, summary(found[0]), summary(found[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks store", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of each library (default 7)")
    parser.add_argument(
        "--best", action="store_true", help="each library's best round, not its median"
    )
    options = parser.parse_args(arguments)
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        print("python -m benchmarks store compares with torch: pip install torch", file=sys.stderr)
        return 1
    print(f"{'call':<14}{'unit':>5}{'nc10d':>10}{'torch':>10}{'ratio':>8}")
    for row, ours, theirs in measure_all(options.rounds, options.best):
        ratio = theirs / ours if row.less else ours / theirs
        print(f"{row.name:<14}{row.unit:>5}{ours:>10.1f}{theirs:>10.1f}{ratio:>8.2f}", flush=True)
    return 0
