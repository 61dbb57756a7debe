"""Connect the ranks of a job to a shared store, from an init method and the environment.

Methods: `env://` (rank, size and address from the environment),
`tcp://host:port?rank=R&world_size=N`, `file:///path?rank=R&world_size=N`, and the schemes of
`register_rendezvous_handler`. Arguments of the call take precedence over all of them. With
`env://` and `tcp://`, rank 0 hosts the store's server, unless a launcher's agent does
(TORCHELASTIC_USE_AGENT_STORE=True). A world of one rank needs no address: without MASTER_ADDR and
MASTER_PORT the store is private. The returned store contains only keys of this world: the restart
count and the number of its meeting are part of every key.

No rank returns before all ranks have arrived; the error names the missing ranks. The server of rank
0 belongs to one world. If the host leaves before all have met, the others leave as well, and wait
for the server of the next rank 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import SplitResult, parse_qs, parse_qsl, unquote, urlencode, urlsplit

from nc10d.auth.token import job_token, require_token
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.signal_errors import raised_here
from nc10d.errors import RendezvousError, StoreTimeout
from nc10d.init_methods.launcher_env import RankPlace, find_place, launcher_ancestor
from nc10d.init_methods.meeting import HostLeft, meet
from nc10d.store.base import Store, as_own_store
from nc10d.store.file import FileStore
from nc10d.store.hosting import PortTaken
from nc10d.store.local import HashStore
from nc10d.store.prefix import PrefixStore
from nc10d.store.tcp import TCPStore
from nc10d.store.wire import OWNER_LEFT

Rendezvous = tuple[Store, int, int]
_PORT_SECONDS, _PORT_PAUSE = 2.0, 0.02
"""The time in which the server of a killed process gives up the port, and a pause between tries."""


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """A store to meet in, this rank and the number of ranks; `host_left` as for `meet`."""

    store: Store
    rank: int
    size: int
    host_left: Callable[[], bool] = lambda: False


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
    limit = seconds(timeout)
    return meet_by(init_method, rank, world_size, Deadline.after(limit), limit)


def meet_by(
    init_method: str, rank: int | None, world_size: int | None, deadline: Deadline, limit: float
) -> Rendezvous:
    """As `rendezvous`, for a caller whose `deadline`, after `limit` seconds, runs already."""
    url = urlsplit(init_method)
    find_point = _METHODS.get(url.scheme)
    if find_point is None:
        known = ", ".join(f"{scheme}://" for scheme in _METHODS)
        raise ValueError(f"init_method {init_method!r} is not one of {known}")
    rank, size = _non_negative(rank), _non_negative(world_size)
    if rank is not None and size is not None:
        _check_rank(rank, size)
    left: HostLeft | None = None
    while True:
        try:
            point = find_point(url, rank, size, deadline)
        except raised_here(StoreTimeout) as error:
            raise (error if left is None else _not_back(left)) from left
        try:
            return _meet_at(point, deadline, limit), point.rank, point.size
        except HostLeft as error:
            left = error
            point.store.close()
        except BaseException:
            point.store.close()
            raise


def _meet_at(point: MeetingPoint, deadline: Deadline, limit: float) -> Store:
    _check_rank(point.rank, point.size)
    prefix = f"nc10d/{_restart()}"
    meetings = PrefixStore(f"{prefix}/meeting", point.store)
    number = meet(meetings, point.rank, point.size, deadline, limit, point.host_left)
    point.store.set_timeout(limit)
    return PrefixStore(f"{prefix}/{number}", point.store, closes=True)


def _not_back(left: HostLeft) -> RendezvousError:
    return RendezvousError(f"rank 0, the host of the store, has left and not come back; {left}")


def _restart() -> str:
    """Return the launcher's count of restarts: the ranks of another attempt never meet these."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "NC10D_RESTART_COUNT")
    return next((os.environ[name] for name in counts if name in os.environ), "0")


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is outside a world of {size}")


def _non_negative(number: int | None) -> int | None:
    return None if number is None or number < 0 else number


def _point_by_environment(
    url: SplitResult, rank: int | None, size: int | None, deadline: Deadline
) -> MeetingPoint:
    rank, size = _rank_and_size(url, rank, size)
    if _is_alone(rank, size):
        return MeetingPoint(HashStore(), 0, 1)
    return _point_at(find_place(os.environ, rank, size, launcher_ancestor), deadline)


def _is_alone(rank: int | None, size: int | None) -> bool:
    """Return whether a world of this rank alone is asked for, and no address for its store."""
    given = {"RANK": rank, "WORLD_SIZE": size}
    place = [os.environ.get(name) if n is None else str(n) for name, n in given.items()]
    return place == ["0", "1"] and not {"MASTER_ADDR", "MASTER_PORT"} & os.environ.keys()


def _point_by_address(
    url: SplitResult, rank: int | None, size: int | None, deadline: Deadline
) -> MeetingPoint:
    rank, size = _required_rank_and_size(url, rank, size)
    if not url.hostname or url.port is None:
        what = "host name" if not url.hostname else "port number"
        raise ValueError(f"{what} missing: init_method {url.geturl()!r} must be tcp://host:port")
    return _point_at(RankPlace(rank, size, url.hostname, url.port), deadline)


def _point_at(place: RankPlace, deadline: Deadline) -> MeetingPoint:
    if not place.served:  # an agent chooses its address itself
        require_token(place.host, "the store in which the ranks meet")
    serves = place.rank == 0 and not place.served
    store = _served_store(place, deadline) if serves else _tcp_store(place, deadline)
    job = PrefixStore(place.job, store, closes=True) if place.job else store
    if serves or place.served:
        return MeetingPoint(job, place.rank, place.size)
    return MeetingPoint(job, place.rank, place.size, lambda: store.check([OWNER_LEFT]))


def _served_store(place: RankPlace, deadline: Deadline) -> TCPStore:
    """Host the store; if the rank 0 before was killed, its server gives the port up in a moment."""
    until = Deadline.after(deadline.slice(_PORT_SECONDS))
    while True:
        try:
            return _tcp_store(place, deadline, serves=True)
        except PortTaken:
            if until.expired():
                raise
            time.sleep(until.slice(_PORT_PAUSE))


def _tcp_store(place: RankPlace, deadline: Deadline, serves: bool = False) -> TCPStore:
    return TCPStore(
        place.host,
        place.port,
        is_master=serves,
        timeout=round(deadline.remaining(), 3),
        multi_tenant=True,
        token=None if place.foreign else job_token,
    )


def _point_in_file(
    url: SplitResult, rank: int | None, size: int | None, deadline: Deadline
) -> MeetingPoint:
    rank, size = _required_rank_and_size(url, rank, size)
    if url.netloc not in ("", "localhost") or not url.path:
        raise ValueError(f"path missing: init_method {url.geturl()!r} must be file:///path")
    store = FileStore(unquote(url.path), size, timeout=deadline.remaining())
    return MeetingPoint(store, rank, size)


_Method = Callable[[SplitResult, int | None, int | None, Deadline], MeetingPoint]
_METHODS: dict[str, _Method] = {
    "env": _point_by_environment,
    "tcp": _point_by_address,
    "file": _point_in_file,
}


def register_rendezvous_handler(scheme: str, handler: Callable[..., Iterator[Rendezvous]]) -> None:
    """Let the init method "scheme://..." take the store, rank and world size that `handler` yields.

    The call is `handler(url, timeout=timedelta)`; the URL's query has the `rank` and `world_size`
    that the program has given. The first triple counts. All ranks then meet in the store, which may
    be one that an earlier world has used. RuntimeError for a scheme that has a handler.
    """
    if scheme in _METHODS:
        raise RuntimeError(f"{scheme}:// has a handler already")

    def find_point(
        url: SplitResult, rank: int | None, size: int | None, deadline: Deadline
    ) -> MeetingPoint:
        given = {"rank": rank, "world_size": size}
        query = dict(parse_qsl(url.query)) | {k: str(n) for k, n in given.items() if n is not None}
        whole = url._replace(query=urlencode(query)).geturl()
        limit = timedelta(seconds=deadline.slice(timedelta.max.total_seconds()))
        store, own, count = next(handler(whole, timeout=limit))
        return MeetingPoint(as_own_store(store), int(own), int(count))

    _METHODS[scheme] = find_point


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
        where = f"give it as an argument or as ?{name}="
        raise ValueError(f"{name} parameter missing with {url.scheme}://: {where}")
    return rank, size
