"""How the ranks of a job find each other: from a method and the environment to a shared store.

Methods: `env://` (who and where from the environment), `tcp://host:port?rank=R&world_size=N`,
`file:///path?rank=R&world_size=N`. Rank and size given to the call win over all of them. With
`env://` and `tcp://`, rank 0 hosts the store's server, except where a launcher's agent does
(TORCHELASTIC_USE_AGENT_STORE=True). The store that comes back shows only keys of this start of the
job: the restart count and the number of earlier calls are part of every key.

Nobody returns before all ranks have come; who is missing is named in the error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from nc10d.auth.token import demand, job_token
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.errors import RendezvousError
from nc10d.rendezvous.launcher_env import RankPlace, find_place, launcher_ancestor
from nc10d.store.arrival import come, say
from nc10d.store.base import Store
from nc10d.store.file import FileStore
from nc10d.store.hosting import keep_one
from nc10d.store.prefix import PrefixStore
from nc10d.store.tcp import TCPStore

Met = tuple[Store, int, int]
_MOST_NAMED = 16
_WELL = "well"
# How often this process has been each rank of each meeting point: ranks may be threads.
_calls: Counter[tuple[str, int]] = Counter()


def rendezvous(
    init_method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    timeout: Timeout = 300.0,
) -> Met:
    """Meet the other ranks; return the store they share, this rank and the number of ranks.

    `rank` and `world_size` may be None (or negative) where the method knows them. `timeout` is
    the whole call's, and then the store's. Blocks until all ranks have come. RendezvousError
    says which variable is missing, which ranks did not come, or who disagrees on their number;
    StoreError that the address is taken or unreachable; AuthError that others can reach it and the
    job has no token; a malformed method is a ValueError.
    Closing the store lets go of it.
    """
    url = urlsplit(init_method)
    meet = _METHODS.get(url.scheme)
    if meet is None:
        known = ", ".join(f"{scheme}://" for scheme in _METHODS)
        raise ValueError(f"init_method {init_method!r} is not one of {known}")
    limit = seconds(timeout)
    deadline = Deadline.after(limit)
    rank, size = _given(rank), _given(world_size)
    if rank is not None and size is not None:
        _check_rank(rank, size)
    store, point, rank, size = meet(url, rank, size, limit)
    try:
        mine = PrefixStore(_prefix(point, rank), store, closes=True)
        _gather(mine, rank, size, deadline, limit)
    except BaseException:
        store.close()
        raise
    return mine, rank, size


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is outside a world of {size}")


def _given(number: int | None) -> int | None:
    return None if number is None or number < 0 else number


def _prefix(point: str, rank: int) -> str:
    """Return what sets this start of the job apart from others that meet at the same point."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "NC10D_RESTART_COUNT")
    restart = next((os.environ[name] for name in counts if name in os.environ), "0")
    _calls[point, rank] += 1
    return f"nc10d/{restart}/{_calls[point, rank]}"


def _gather(store: Store, rank: int, size: int, deadline: Deadline, limit: float) -> None:
    """Block until all ranks have come; they must agree on their number."""
    _check_rank(rank, size)
    if store.add(f"rank/{rank}", 1) != 1:
        raise RendezvousError(f"rank {rank} of {size} has come twice", rank=rank)
    dispute = _dispute(store, rank, size)
    if dispute:
        say(store, dispute)  # the first dispute is everybody's
    missing = partial(_who_is_missing, store, size, limit)
    verdict = come(store, size, lambda: _WELL, missing, deadline).decode()
    failure = dispute if verdict == _WELL else verdict  # who comes too many is told alone
    if failure:
        raise RendezvousError(failure)


def _dispute(store: Store, rank: int, size: int) -> str:
    """Say how this rank and the first that came differ in the size of the world; or nothing."""
    first = store.compare_set("size", "", f"{rank} {size}").decode()
    other, other_size = map(int, first.split())
    if other_size == size:
        return ""
    return (
        f"the ranks don't agree on their number: rank {rank} was started with a world size of "
        f"{size}, rank {other} with {other_size} (WORLD_SIZE, or the argument world_size)"
    )


def _who_is_missing(store: Store, size: int, limit: float) -> str:
    absent = [rank for rank in range(size) if not store.check([f"rank/{rank}"])]
    named = ", ".join(map(str, absent[:_MOST_NAMED]))
    more = "" if len(absent) <= _MOST_NAMED else f" and {len(absent) - _MOST_NAMED} more"
    return (
        f"{size - len(absent)} of {size} ranks came within {limit:g} s; missing: {named}{more} "
        f"(their output says why they did not start, or they use another address)"
    )


def _meet_by_environment(
    url: SplitResult, rank: int | None, size: int | None, limit: float
) -> tuple[Store, str, int, int]:
    rank, size = _asked(url, rank, size)
    place = find_place(os.environ, rank, size, launcher_ancestor)
    return _meet_at(place, limit)


def _meet_by_address(
    url: SplitResult, rank: int | None, size: int | None, limit: float
) -> tuple[Store, str, int, int]:
    rank, size = _required(url, rank, size)
    if not url.hostname or url.port is None:
        raise ValueError(f"init_method {url.geturl()!r} must be tcp://host:port")
    return _meet_at(RankPlace(rank, size, url.hostname, url.port), limit)


def _meet_at(place: RankPlace, limit: float) -> tuple[Store, str, int, int]:
    host, port = place.host, place.port
    serves = place.rank == 0 and not place.served
    if not place.served:  # an agent has its own opinion of where to listen
        demand(host, "the store in which the ranks meet")
    if serves:
        # A second init meets at the same port, where clients of the first may still be connected.
        keep_one(host, port)
    store = TCPStore(
        host,
        port,
        is_master=serves,
        timeout=limit,
        multi_tenant=True,
        token=None if place.foreign else job_token,
    )
    point = f"{host}:{port}/{place.job}"
    job = PrefixStore(place.job, store, closes=True) if place.job else store
    return job, point, place.rank, place.size


def _meet_in_file(
    url: SplitResult, rank: int | None, size: int | None, limit: float
) -> tuple[Store, str, int, int]:
    rank, size = _required(url, rank, size)
    if url.netloc not in ("", "localhost") or not url.path:
        raise ValueError(f"init_method {url.geturl()!r} must be file:///path")
    path = unquote(url.path)
    store = FileStore(path, size)
    store.set_timeout(limit)
    return store, path, rank, size


_METHODS: dict[
    str, Callable[[SplitResult, int | None, int | None, float], tuple[Store, str, int, int]]
] = {"env": _meet_by_environment, "tcp": _meet_by_address, "file": _meet_in_file}


def _asked(url: SplitResult, rank: int | None, size: int | None) -> tuple[int | None, int | None]:
    """Return rank and size as given to the call, else as the URL has them."""
    query = parse_qs(url.query)
    found = []
    for name, number in (("rank", rank), ("world_size", size)):
        text = query.get(name, [None])[-1]
        found.append(int(text) if number is None and text is not None else number)
    return found[0], found[1]


def _required(url: SplitResult, rank: int | None, size: int | None) -> tuple[int, int]:
    rank, size = _asked(url, rank, size)
    if rank is None or size is None:
        name = "rank" if rank is None else "world_size"
        raise ValueError(f"{name} is needed with {url.scheme}://: as an argument or as ?{name}=")
    return rank, size
