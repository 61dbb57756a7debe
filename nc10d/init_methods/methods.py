"""Connect the ranks of a job to a shared store, from an init method and the environment.

Methods: `env://` (rank, size and address from the environment),
`tcp://host:port?rank=R&world_size=N`, `file:///path?rank=R&world_size=N`. Arguments of the call
take precedence over all of them. With `env://` and `tcp://`, rank 0 hosts the store's server,
unless a launcher's agent does (TORCHELASTIC_USE_AGENT_STORE=True). The returned store contains only
keys of this start of the job: the restart count and the number of earlier calls are part of every
key.

No rank returns before all ranks have arrived; the error names the missing ranks.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from nc10d.auth.token import job_token, require_token
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.errors import RendezvousError
from nc10d.init_methods.launcher_env import RankPlace, find_place, launcher_ancestor
from nc10d.store.arrival import arrive, publish_outcome
from nc10d.store.base import Store
from nc10d.store.file import FileStore
from nc10d.store.hosting import keep_server
from nc10d.store.prefix import PrefixStore
from nc10d.store.tcp import TCPStore

Rendezvous = tuple[Store, int, int]
Meeting = tuple[Store, str, int, int]
"""The store, a name of the meeting point, this rank and the number of ranks."""
_MOST_NAMED = 16
_ALL_PRESENT = "well"
# Calls of this process by address and rank: ranks may be threads.
_calls: Counter[tuple[str, int]] = Counter()


def rendezvous(
    init_method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    timeout: Timeout = 300.0,
) -> Rendezvous:
    """Meet the other ranks; return the shared store, this rank and the number of ranks.

    `rank` and `world_size` may be None (or negative) if the method provides them. `timeout` limits
    the whole call, and becomes the store's timeout. Blocks until all ranks have arrived.

    RendezvousError names a missing variable, the missing ranks, or ranks that disagree on the world
    size. StoreError: the address is in use or unreachable. AuthError: other machines can reach the
    address and the job has no token. ValueError: the method is malformed.

    The caller closes the store.
    """
    url = urlsplit(init_method)
    meet = _METHODS.get(url.scheme)
    if meet is None:
        known = ", ".join(f"{scheme}://" for scheme in _METHODS)
        raise ValueError(f"init_method {init_method!r} is not one of {known}")
    limit = seconds(timeout)
    deadline = Deadline.after(limit)
    rank, size = _non_negative(rank), _non_negative(world_size)
    if rank is not None and size is not None:
        _check_rank(rank, size)
    store, point, rank, size = meet(url, rank, size, limit)
    try:
        shared = PrefixStore(_prefix(point, rank), store, closes=True)
        _wait_for_ranks(shared, rank, size, deadline, limit)
    except BaseException:
        store.close()
        raise
    return shared, rank, size


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is outside a world of {size}")


def _non_negative(number: int | None) -> int | None:
    return None if number is None or number < 0 else number


def _prefix(point: str, rank: int) -> str:
    """Return the key prefix of this start of the job, unique among starts at the same address."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "NC10D_RESTART_COUNT")
    restart = next((os.environ[name] for name in counts if name in os.environ), "0")
    _calls[point, rank] += 1
    return f"nc10d/{restart}/{_calls[point, rank]}"


def _wait_for_ranks(store: Store, rank: int, size: int, deadline: Deadline, limit: float) -> None:
    """Block until all ranks have arrived; RendezvousError if they disagree on the world size."""
    _check_rank(rank, size)
    if store.add(f"rank/{rank}", 1) != 1:
        raise RendezvousError(f"rank {rank} of {size} has come twice", rank=rank)
    dispute = _size_disagreement(store, rank, size)
    if dispute:
        publish_outcome(store, dispute)  # all ranks raise the first disagreement
    missing = partial(_missing_ranks, store, size, limit)
    outcome = arrive(store, size, lambda: _ALL_PRESENT, missing, deadline).decode()
    # A surplus rank arrives after the outcome was published: only that rank raises its dispute.
    failure = dispute if outcome == _ALL_PRESENT else outcome
    if failure:
        raise RendezvousError(failure)


def _size_disagreement(store: Store, rank: int, size: int) -> str:
    """Describe how this rank and the first differ in the world size; empty if they agree."""
    first = store.compare_set("size", "", f"{rank} {size}").decode()
    other, other_size = map(int, first.split())
    if other_size == size:
        return ""
    return (
        f"the ranks don't agree on their number: rank {rank} was started with a world size of "
        f"{size}, rank {other} with {other_size} (WORLD_SIZE, or the argument world_size)"
    )


def _missing_ranks(store: Store, size: int, limit: float) -> str:
    absent = [rank for rank in range(size) if not store.check([f"rank/{rank}"])]
    named = ", ".join(map(str, absent[:_MOST_NAMED]))
    more = "" if len(absent) <= _MOST_NAMED else f" and {len(absent) - _MOST_NAMED} more"
    return (
        f"{size - len(absent)} of {size} ranks came within {limit:g} s; missing: {named}{more} "
        f"(their output says why they did not start, or they use another address)"
    )


def _meet_by_environment(
    url: SplitResult, rank: int | None, size: int | None, limit: float
) -> Meeting:
    rank, size = _rank_and_size(url, rank, size)
    place = find_place(os.environ, rank, size, launcher_ancestor)
    return _meet_at(place, limit)


def _meet_by_address(url: SplitResult, rank: int | None, size: int | None, limit: float) -> Meeting:
    rank, size = _required_rank_and_size(url, rank, size)
    if not url.hostname or url.port is None:
        raise ValueError(f"init_method {url.geturl()!r} must be tcp://host:port")
    return _meet_at(RankPlace(rank, size, url.hostname, url.port), limit)


def _meet_at(place: RankPlace, limit: float) -> Meeting:
    host, port = place.host, place.port
    serves = place.rank == 0 and not place.served
    if not place.served:  # an agent chooses its address itself
        require_token(host, "the store in which the ranks meet")
    if serves:
        # A second init uses the same port while clients of the first may still be connected.
        keep_server(host, port)
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


def _meet_in_file(url: SplitResult, rank: int | None, size: int | None, limit: float) -> Meeting:
    rank, size = _required_rank_and_size(url, rank, size)
    if url.netloc not in ("", "localhost") or not url.path:
        raise ValueError(f"init_method {url.geturl()!r} must be file:///path")
    path = unquote(url.path)
    store = FileStore(path, size)
    store.set_timeout(limit)
    return store, path, rank, size


_METHODS: dict[str, Callable[[SplitResult, int | None, int | None, float], Meeting]] = {
    "env": _meet_by_environment,
    "tcp": _meet_by_address,
    "file": _meet_in_file,
}


def _rank_and_size(
    url: SplitResult, rank: int | None, size: int | None
) -> tuple[int | None, int | None]:
    """Return the rank and size given to the call, else those of the URL."""
    query = parse_qs(url.query)
    found = []
    for name, number in (("rank", rank), ("world_size", size)):
        text = query.get(name, [None])[-1]
        found.append(int(text) if number is None and text is not None else number)
    return found[0], found[1]


def _required_rank_and_size(
    url: SplitResult, rank: int | None, size: int | None
) -> tuple[int, int]:
    rank, size = _rank_and_size(url, rank, size)
    if rank is None or size is None:
        name = "rank" if rank is None else "world_size"
        raise ValueError(f"{name} is needed with {url.scheme}://: as an argument or as ?{name}=")
    return rank, size
