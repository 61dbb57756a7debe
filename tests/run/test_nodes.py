"""How launchers agree on the ranks of several nodes."""

from __future__ import annotations

import pytest

from nc10d.errors import StoreError
from nc10d.run import nodes
from nc10d.run.launch_options import read
from nc10d.store import HashStore

OPTIONS = "--nnodes 2 --node-rank 0 --rdzv-endpoint h --rdzv-conf timeout=9"
REQUEST = read([*OPTIONS.split(), "a.py"])


def agree_with(raw: str | bytes) -> tuple[int, ...]:
    store = HashStore()
    store.set(f"nc10d-run/{REQUEST.job.run_id}/1", raw)
    return nodes._agree(REQUEST, REQUEST.job, store, True, print).counts


def test_every_node_learns_all_numbers_of_ranks() -> None:
    assert agree_with("3") == (1, 3)


@pytest.mark.parametrize("raw", [b"", b"x", b"\xff", b"0", b"-1", b"1.5", b"9" * 30, b"1\0"])
def test_a_number_that_no_launcher_writes_is_an_error_that_names_its_key(raw: bytes) -> None:
    with pytest.raises(StoreError, match="no valid value of '1'"):
        agree_with(raw)
