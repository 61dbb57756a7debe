"""The flight recorder: every rank's latest calls, on demand, on a failure and on a signal."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Job, all_say

import nc10d as dist
from nc10d.backend.cpu.native.offsets import LOG_SLOTS
from nc10d.base.call_site import text_at
from nc10d.debug.diagnosis import diagnose
from nc10d.errors import DistError
from nc10d.group import flight_recorder
from nc10d.group.flight_recorder import COMPLETED, STARTED, Dump, Entry, FlightRecorder, Traffic
from nc10d.testing import Ranks, run_local, run_ranks


def recorded(group: Any) -> list[Entry]:
    x = np.ones(3)
    group.all_reduce(x)
    group.broadcast(x, 0)
    group.barrier()
    return FlightRecorder(group).entries()


def line_of(function: Any, offset: int) -> str:
    code = function.__code__
    return text_at(code.co_filename, code.co_firstlineno + offset)


def sited(group: Any) -> list[Entry]:
    x, y = np.ones(3), np.ones(5)
    for _ in range(3):
        group.all_reduce(x)
        group.all_reduce(x, async_op=True).wait()
        dist.all_reduce(y, group=group)
        with dist.coalescing_manager(group):
            group.all_reduce(x)
            group.all_reduce(y)
        if group.rank == 0:
            group.send(x, 1, tag=3)
        else:
            group.recv(x, 0, tag=3)
        recorded(group)
    return FlightRecorder(group).entries()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_every_entry_has_the_line_that_made_the_call(kind: Any) -> None:
    within = [line_of(recorded, offset) for offset in (2, 3, 4)]
    for rank, entries in enumerate(run_ranks(sited, 2, kind)):
        block = [line_of(sited, 6)] * 2  # arrays of two sizes are two calls of the batch
        first = [line_of(sited, offset) for offset in (3, 4, 5)]
        message = line_of(sited, 10 + 2 * rank)
        assert [entry.site for entry in entries] == 3 * [*first, *block, message, *within]


def test_entries_have_times_and_messages_are_among_them() -> None:
    for rank, entries in enumerate(run_ranks(sited, 2)):
        assert all(0 < entry.begun <= entry.ended for entry in entries)
        calls = [entry for entry in entries if not entry.message]
        assert [entry.seq for entry in calls] == [*range(1, len(calls) + 1)]
        assert all(a.ended <= b.begun for a, b in itertools.pairwise(calls))
        name, peer = ("recv", "src=0") if rank else ("send", "dst=1")
        call = f"{name}(dtype=float64, count=3, {peer}, tag=3)"
        assert [(entry.seq, entry.call) for entry in entries if entry.message] == [
            (number, call) for number in (1, 2, 3)
        ]


def test_the_latest_calls_are_recorded_by_default() -> None:
    for entries in run_ranks(recorded, 2):
        assert [(entry.seq, entry.op, entry.state) for entry in entries] == [
            (1, "all_reduce", COMPLETED),
            (2, "broadcast", COMPLETED),
            (3, "barrier", COMPLETED),
        ]
        assert entries[0].call == "all_reduce(dtype=float64, count=3, op=SUM)"


def messages(group: Any, more: threading.Event) -> Dump:
    """Send three messages from rank 0 to 1; then rank 1 waits for a fourth."""
    x = np.ones(3)
    for _ in range(3):
        if group.rank == 0:
            group.send(x, 1)
        else:
            group.recv(x, 0)
    if group.rank == 0:
        assert more.wait(30)
        dump = FlightRecorder(group).dump()
        group.send(x, 1)
        return dump
    work = group.irecv(x, 0)
    with pytest.raises(DistError):
        work.wait(0.1)
    dump = FlightRecorder(group).dump()
    more.set()
    work.wait()
    return dump


def test_messages_are_counted_at_both_ends() -> None:
    dumps = run_ranks(messages, 2, "threads", [threading.Event()] * 2)
    assert dumps[0].traffic == [Traffic("to", 1, 3, False)]
    assert [(one.direction, one.peer, one.waits) for one in dumps[1].traffic] == [("from", 0, True)]
    (line,) = diagnose(dumps).messages
    assert "rank 1 waits for a message from rank 0 after 3; rank 0 has sent 3" in line


def received(group: Any) -> Any:
    x = np.zeros(2)
    if group.rank == 0:
        group.send(x, 1)
    else:
        group.recv(x, 0)
    group.barrier()
    return FlightRecorder(group).dump()


def test_a_receive_that_has_returned_does_not_wait() -> None:
    dumps = run_ranks(received, 2)
    assert dumps[1].traffic == [Traffic("from", 0, 1, False)]
    assert not diagnose(dumps).messages


def many(group: Any) -> list[Entry]:
    for _ in range(LOG_SLOTS + 500):
        group.barrier()
    return FlightRecorder(group).entries()


def test_the_number_of_records_is_bounded() -> None:
    for entries in run_ranks(many, 2):
        assert [entry.seq for entry in entries] == [*range(501, LOG_SLOTS + 501)]
        assert all(entry.state == COMPLETED for entry in entries)


def test_a_backend_without_records_is_refused() -> None:
    def ask(group: Any) -> None:
        with pytest.raises(TypeError, match="keeps no records"):
            FlightRecorder(group)

    run_local(ask, 1)


def failing(group: Any) -> str:
    group.barrier()
    try:
        group.all_reduce(np.ones(4 + group.rank // 2))
    except DistError as error:
        return str(error)
    return "nothing"


def test_each_rank_leaves_a_dump_when_the_group_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flight_recorder.FOLDER, str(tmp_path / "dumps"))
    with Ranks(3) as ranks:
        errors = ranks.run(failing)
    files = sorted((tmp_path / "dumps").iterdir())
    assert [file.name for file in files] == [f"world-rank{rank}.json" for rank in range(3)]
    for rank, file in enumerate(files):
        dump = Dump.from_json(file.read_text())
        assert (dump.rank, dump.size, dump.ranks) == (rank, 3, [0, 1, 2])
        assert dump.why == f"CollectiveMismatch: {errors[rank]}"
        assert dump.entries[-1].seq == 2
        assert dump.entries[-1].state == STARTED
        assert dump.last == {0: 2, 1: 2, 2: 2}
        assert dump.pid == os.getpid()
        assert file.stat().st_mode & 0o777 == 0o600, "calls and lines are the user's own"


def test_a_folder_that_can_not_be_written_to_changes_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(flight_recorder.FOLDER, str(tmp_path / "file" / "dumps"))
    with Ranks(3) as ranks:
        assert all("ranks disagree" in message for message in ranks.run(failing))


SIGNALLED = """
os.environ["NC10D_DUMP_DIR"], os.environ["NC10D_DUMP_SIGNAL"] = {folder!r}, "USR2"
before = []
signal.signal(signal.SIGUSR2, lambda number, frame: before.append(number))
group = join()
group.barrier()
say("ready")
if rank == 0:
    group.all_reduce(np.ones(4))
else:
    hear()
    group.all_reduce(np.ones(4))
say("over", before == [signal.SIGUSR2])
"""


def test_on_a_signal_a_waiting_rank_reports_its_peer(tmp_path: Path) -> None:
    with Job(SIGNALLED.format(folder=str(tmp_path)), 2) as ranks:
        all_say(ranks, "ready")
        assert ranks[0].asleep("shared futex")
        ranks[0].kill(signal.SIGUSR2)
        path = tmp_path / "world-rank0.json"
        while not path.exists():
            assert ranks[0].process.poll() is None
        dump = Dump.from_json(path.read_text())
        assert dump.why == "signal SIGUSR2"
        assert dump.waits_for == 1
        assert dump.entries[-1] == replace(dump.entries[-1], seq=2, state=STARTED, ended=0)
        assert dump.last == {0: 2, 1: 1}
        ranks[1].tell("go")
        assert ranks[0].line() == "over True"
        assert ranks[1].line() == "over False"


ENDED = """
os.environ["NC10D_DUMP_DIR"], os.environ["NC10D_DUMP_SIGNAL"] = {folder!r}, "USR2"
join().barrier()
over = [dist.new_group([0]), dist.new_group([0])]
for group in over:
    group.barrier()
over[0].abort()
over[1].close()
os.kill(os.getpid(), signal.SIGUSR2)
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGUSR2)
    os._exit(0)
say("over", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_signal_skips_closed_groups(tmp_path: Path) -> None:
    with Job(ENDED.format(folder=str(tmp_path)), 1) as (rank,):
        assert rank.line() == "over 0"
        assert (tmp_path / "world-rank0.json").exists()
        assert rank.ended() == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', "7"])
def test_a_text_that_is_no_dump_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Dump.from_json(text)


def test_a_dump_survives_its_file() -> None:
    sent = Entry(1, "send()", COMPLETED, 1, 2, "a.py:3", True)
    entries = [Entry(4, "barrier", STARTED, 17), sent]
    traffic = [Traffic("to", 2, 5, True)]
    last = {0: 4, 1: 4, 2: 3}
    dump = Dump("a", 1, 3, [4, 5, 6], "host", 7, 1.5, "why", 2, 0, entries, traffic, last, 9)
    assert Dump.from_json(dump.to_json()) == dump
    assert json.loads(dump.to_json())["format"] == flight_recorder.FORMAT
