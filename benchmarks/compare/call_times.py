"""Times one library's collectives on a rank of its job, for `python -m benchmarks compare`.

All libraries do the same work on the same memory in the same loop: plain float32 arrays in the
sizes of nccl-tests (`nbytes` is the larger buffer of a rank). Each rank writes the array that a
call reads just before the call, as programs do. The time of the writing is measured alone, in turns
with the calls, and subtracted. A call that makes the next writing slower is charged for that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from benchmarks.libraries.base import Array, Call, Library, ObjectCall, cut, uneven
from benchmarks.libraries.c10d import WINDOW
from benchmarks.libraries.tcp import Tcp

ROUNDS = 5
WARM_UP = 10
"""Calls before the first that counts: code that is loaded on first use is loaded by then."""
WINDOWS = {"window", "message_window"}
"""Asynchronous calls on WINDOW pieces of the arrays, which are then waited for."""
WHOLE = {"all_reduce", "broadcast", "reduce", "scan", "exscan", "ping_pong", "exchange"} | WINDOWS
"""Collectives whose arrays all have the whole size; in others a chunk is 1/size of it."""
MESSAGES = {"ping_pong", "exchange", "message_window"}
IN_PLACE = {"all_reduce", "broadcast", "reduce", "scan", "exscan", "window"}
FROM_CHUNK = {"all_gather", "gather"}
"""Collectives whose input is a rank's chunk."""
TO_ROOT = {"reduce", "gather"}
FROM_ROOT = {"broadcast", "scatter"}
"""Collectives that have a result, or read an array, on rank 0 alone."""
FORMS = ("list", "uneven", "object")
Check = Callable[[], int]


def pattern(rank: int, count: int) -> Array:
    """Return a rank's contribution: 0 to 6, unlike its neighbour's."""
    return ((np.arange(count) + 3 * rank) % 7).astype(np.float32)


def plain(collective: str) -> tuple[str, str]:
    """Return the collective of which this is a form, and the form; "" for the collective itself."""
    name, _, form = collective.rpartition("_")
    return (name, form) if form in FORMS else (collective, "")


def expected(collective: str, inputs: list[Array], rank: int) -> tuple[Array, Array]:
    """Return a rank's input, and its expected output, given every rank's whole input."""
    name, form = plain(collective)
    size, count = len(inputs), inputs[0].size
    sizes = uneven(count, size) if form == "uneven" else [count // size] * size
    chunks = [[x] if name in WHOLE else cut(x, sizes) for x in inputs]
    if name in FROM_CHUNK and form == "uneven":
        chunks = [[own[r]] for r, own in enumerate(chunks)]
    x = chunks[rank][0] if name in FROM_CHUNK else inputs[rank]
    return x, EXPECTED[name](chunks, rank)


def _total(arrays: list[Array]) -> Array:
    return np.asarray(np.sum(arrays, axis=0, dtype=np.float32))


EXPECTED: dict[str, Callable[[list[list[Array]], int], Array]] = {
    "all_reduce": lambda chunks, _: _total([own[0] for own in chunks]),
    "all_gather": lambda chunks, _: np.concatenate([own[0] for own in chunks]),
    "reduce_scatter": lambda chunks, rank: _total([own[rank] for own in chunks]),
    "broadcast": lambda chunks, _: chunks[0][0],
    "reduce": lambda chunks, _: _total([own[0] for own in chunks]),
    "scan": lambda chunks, rank: _total([own[0] for own in chunks[: rank + 1]]),
    "exscan": lambda chunks, rank: _total([own[0] for own in chunks[: max(1, rank)]]),
    "gather": lambda chunks, _: np.concatenate([own[0] for own in chunks]),
    "scatter": lambda chunks, rank: chunks[0][rank],
    "all_to_all": lambda chunks, rank: np.concatenate([own[rank] for own in chunks]),
    "ping_pong": lambda chunks, rank: chunks[rank ^ 1][0],
    "exchange": lambda chunks, rank: chunks[rank ^ 1][0],
    "message_window": lambda chunks, rank: chunks[rank ^ 1][0],
    "window": lambda chunks, _: _total([own[0] for own in chunks]),
}
"""The output of a rank, given every rank's chunks."""


def nothing() -> None:
    """Do nothing: for calls that read no array."""


def prepare(library: Library, collective: str, nbytes: int) -> tuple[Call, Call, Check]:
    """Return the call to time, a call that writes its input, and a check.

    The check makes the call once and counts wrong elements.
    """
    if isinstance(library, Tcp):
        copy, rewrite = library.copy(collective, nbytes)
        return copy, rewrite or nothing, lambda: 0
    size, rank = library.size, library.rank
    if collective == "barrier":
        return barrier_of(library), nothing, lambda: 0
    name, form = plain(collective)
    if name in MESSAGES and rank ^ 1 >= size:  # the last of an odd number has no neighbour
        return nothing, nothing, lambda: 0
    count = max(1, nbytes // 4 // (1 if name in WHOLE else size))
    if collective in WINDOWS:  # equal pieces
        count = -(-count // WINDOW) * WINDOW if count > WINDOW else count
    whole = count * (1 if name in WHOLE else size)
    inputs = [pattern(r, whole) for r in range(size)]
    x, wanted = expected(collective, inputs, rank)
    out = np.zeros_like(wanted)
    call = library.bind(out, x)[collective]

    def check() -> int:
        out[:] = np.resize(inputs[rank], out.size)
        call()
        if isinstance(call, ObjectCall):
            call.store()
        return 0 if name in TO_ROOT and rank else int(np.count_nonzero(out != wanted))

    read = out if name in IN_PLACE and not form else x
    if name in FROM_ROOT and rank != 0:
        return call, nothing, check
    return call, partial(np.multiply, read, np.float32(1), out=read), check


def barrier_of(library: Library) -> Call:
    """Return the library's barrier, bound."""
    unused = np.zeros(1, np.float32)
    return library.bind(unused, unused)["barrier"]


def measure(
    library: Library, collective: str, nbytes: int, budget: float, *, untouched: bool = True
) -> tuple[float, int]:
    """Return the median over rounds of the slowest rank's mean seconds, and wrong elements.

    Results are checked before the rounds and after them. Unless `untouched`, the input is written
    before each call. Blocks for all rounds.
    """
    call, rewrite, check = prepare(library, collective, nbytes)
    wrong = check()
    seconds = timed(library, collective, call, budget, None if untouched else rewrite)
    wrong += check()
    total = np.array([wrong], np.float32)
    library.bind(total, total)["all_reduce"]()
    return seconds, int(total[0])


def timed(
    library: Library, collective: str, call: Call, budget: float, before: Call | None = None
) -> float:
    """Return the median over rounds of the slowest rank's mean seconds; half a ping-pong's.

    The time of `before`, called before each call, is not counted. It is that of the slowest rank,
    for which the others may wait; so all ranks must pass `before`, or none.
    """

    whole = call if before is None else _in_sequence(before, call)

    def mean_of(calls: int) -> float:
        taken = slowest(library, _mean(library, whole, calls))
        if before is None:
            return taken
        return max(0.0, taken - slowest(library, _mean(library, before, calls)))

    _mean(library, whole, WARM_UP)
    probe = slowest(library, _mean(library, whole, 3))
    calls = int(min(5000, max(3, budget / max(probe, 1e-7))))
    found = [mean_of(calls) for _ in range(ROUNDS)]
    return statistics.median(found) / (2 if collective == "ping_pong" else 1)


def _in_sequence(before: Call, call: Call) -> Call:
    def both() -> None:
        before()
        call()

    return both


def slowest(library: Library, value: float) -> float:
    """Return the largest of all ranks' values, on every rank."""
    found = np.zeros(library.size, np.float32)
    found[library.rank] = value
    library.bind(found, found)["all_reduce"]()
    return float(found.max())


def _mean(library: Library, call: Call, calls: int) -> float:
    barrier_of(library)()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def rows(
    library: Library, jobs: Iterable[tuple[str, int]], budget: float, untouched: bool
) -> list[list[object]]:
    """Measure each (collective, nbytes); return [collective, nbytes, seconds, wrong] for each.

    `budget` is the seconds of a round. Blocks for all rounds.
    """
    return [
        [collective, nbytes, *measure(library, collective, nbytes, budget, untouched=untouched)]
        for collective, nbytes in jobs
    ]
