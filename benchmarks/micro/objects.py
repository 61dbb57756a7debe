"""Measure objects by nc10d's codec and by pickle in band.

Both ways turn an object into bytes and back: alone, and by a broadcast of two rank processes. In
band means as c10d does it: `pickle.dumps`, protocol 5, and the same two rounds on the same group.
The ways take turns; a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import nc10d as dist
from nc10d.codec import encode
from nc10d.testing.ranks import Ranks

ROUNDS = 31
LIMIT = 300.0
"""Seconds for one call of a rank: far more than all rounds take."""
Way = Callable[[Any], Any]
HEADER = f"{'object':<28}{'way':<12}{'codec ms':>10}{'pickle ms':>11}{'pickle/codec':>14}"


def arrays() -> Any:
    """Return a dict of 20 arrays of 64 KiB to 1 MiB."""
    return {f"layer {i}": np.random.rand(8192 * (1 + 15 * i // 19)) for i in range(20)}


def settings() -> Any:
    """Return an object like a configuration or a report: small, and of small parts."""
    parts = [{"name": f"part {i}", "rate": i / 7, "sizes": [i, 2 * i, 3 * i]} for i in range(20)]
    return {"step": 12, "seed": 2**40, "parts": parts, "tags": ("a", "b"), "path": None}


def numbers() -> Any:
    """Return a list of 10,000 floats."""
    return [i / 3 for i in range(10_000)]


OBJECTS: dict[str, Callable[[], Any]] = {
    "20 arrays, 64 KiB to 1 MiB": arrays,
    "settings of 213 values": settings,
    "list of 10,000 floats": numbers,
}


def through_codec(value: Any) -> Any:
    """Encode an object, and decode it again."""
    message = encode(value)
    return message.envelope().open(message.flat())


def through_pickle(value: Any) -> Any:
    """Pickle and unpickle an object as c10d does, with a buffer of bytes for its tensor."""
    return pickle.loads(np.frombuffer(pickle.dumps(value, protocol=5), np.uint8).tobytes())


def broadcast_codec(value: Any) -> Any:
    """Broadcast an object from rank 0."""
    places = [value]
    dist.broadcast_object_list(places, 0)
    return places[0]


def broadcast_pickle(value: Any) -> Any:
    """Broadcast an object from rank 0 as c10d does."""
    if dist.get_rank() == 0:
        stream = np.frombuffer(bytearray(pickle.dumps(value, protocol=5)), np.uint8)
        dist.broadcast(np.array([stream.size]), 0)
        dist.broadcast(stream, 0)
        return value
    size = np.empty(1, np.int64)
    dist.broadcast(size, 0)
    stream = np.empty(int(size[0]), np.uint8)
    dist.broadcast(stream, 0)
    return pickle.loads(stream.tobytes())


def medians(
    ways: Mapping[str, Callable[[Any], Any]], value: Any, ranks: int = 1
) -> dict[str, float]:
    """Return the milliseconds of each way, in turns; among ranks, from barrier to barrier."""
    meet: Callable[[], object] = dist.barrier if ranks > 1 else lambda: None
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 3):
        for name, way in ways.items():
            meet()
            start = time.perf_counter()
            way(value)
            meet()
            if turn >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


ALONE = {"codec": through_codec, "pickle": through_pickle}
BY_BROADCAST = {"codec": broadcast_codec, "pickle": broadcast_pickle}


def on_a_rank(group: Any, name: str) -> dict[str, float]:
    """Measure the broadcasts of an object."""
    return medians(BY_BROADCAST, OBJECTS[name](), group.size)


def line(name: str, way: str, found: dict[str, float]) -> str:
    """Return a row as text, in the columns of HEADER."""
    codec, pickled = found["codec"], found["pickle"]
    return f"{name:<28}{way:<12}{codec:>10.3f}{pickled:>11.3f}{pickled / codec:>14.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    argparse.ArgumentParser(prog="python -m benchmarks objects", description=__doc__).parse_args(
        arguments
    )
    print(f"# load average at the start {os.getloadavg()[0]:.2f}")
    print(HEADER, flush=True)
    with Ranks(2, "processes", timeout=LIMIT) as ranks:
        for name, make in OBJECTS.items():
            print(line(name, "alone", medians(ALONE, make())))
            print(line(name, "broadcast", ranks.run(on_a_rank, [name] * 2)[0]), flush=True)
    return 0
