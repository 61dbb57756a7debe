"""A rank skips a call: the others get an error at its next call, close or exit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jobs import Job, all_say
from lettered_hosts import ranks_on

import nc10d as dist
from nc10d.errors import CollectiveMismatch, DistError, PeerLost

LATEST = 40.0  # the timeout of the groups
HOSTS = ["aa", "ab", "aab"]
"""The host (a letter) of each rank; the last rank skips a call."""


def skip_a_call(group: Any, then: str) -> DistError | None:
    group.barrier()
    if group.rank < group.size - 1:
        with pytest.raises(DistError) as caught:
            group.all_reduce(np.ones(4))
        return caught.value
    if then == "close":
        dist.destroy_process_group()
        return None
    with pytest.raises(CollectiveMismatch) as other:
        group.barrier()
    return other.value


@pytest.mark.parametrize("hosts", HOSTS)
def test_all_ranks_get_an_error_at_the_ranks_next_call(hosts: str) -> None:
    with ranks_on(hosts, LATEST) as ranks:
        errors = ranks.run(skip_a_call, ["call"] * len(hosts))
    assert all(isinstance(error, CollectiveMismatch) for error in errors)
    (message,) = {str(error) for error in errors}
    assert (
        f"rank {len(hosts) - 1} called barrier() at " in message or "called barrier() at" in message
    )
    assert "all_reduce(dtype=float64, count=4, op=SUM) at " in message


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_other_ranks_get_an_error_when_the_rank_closes_its_groups(hosts: str) -> None:
    with ranks_on(hosts, LATEST) as ranks:
        *errors, _ = ranks.run(skip_a_call, ["close"] * len(hosts))
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, PeerLost)
        assert error.rank == len(hosts) - 1
        assert "has left group" in str(error)
        assert "all_reduce #2" in str(error)


EXITS = """
os.environ["NC10D_HOST_ID"] = "aab"[rank]
group = join()
group.barrier()
if rank == 1:
    say("ready")
    hear()
    HOW
else:
    say("ready")
    try:
        dist.all_reduce(np.ones(4))
    except dist.PeerLost as error:
        say(error.rank, error.cause, error.seq)
"""


@pytest.mark.parametrize(
    ("how", "code"), [("sys.exit(3)", 3), pytest.param("pass", 0, marks=pytest.mark.long)]
)
def test_the_other_ranks_get_an_error_when_the_ranks_program_ends(how: str, code: int) -> None:
    """Ranks of its host and of another host learn of it; it ends as without a group."""
    with Job(EXITS.replace("HOW", how), 3) as ranks:
        all_say(ranks, "ready")
        ranks[1].tell("go")
        assert ranks[1].ended() == code
        for rank in (ranks[0], ranks[2]):
            # A rank of its host learns the code, if the process ends soon, and may tell the others.
            assert rank.line() in (f"1 it exited with code {code} 2", "1 its program ends 2")
            assert rank.ended() == 0
            assert rank.errors == []
        assert ranks[1].errors == []
