"""A long wait for other ranks is told on stderr: who waits, how long, for whom, at which line."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

import nc10d as dist
from nc10d.base import wait_report
from nc10d.base.deadline import Deadline
from nc10d.base.text import ranks_text
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError, StoreTimeout
from nc10d.group.process_group import prefix_store
from nc10d.group.world import own_world
from nc10d.init_methods.meeting import meet
from nc10d.store import HashStore, TCPStore
from nc10d.store.arrival import await_ranks
from nc10d.testing import run_ranks

HERE = r"at \S*test_wait_report\.py:\d+"


def told(caplog: pytest.LogCaptureFixture, pattern: str) -> bool:
    return any(re.search(pattern, message) for message in caplog.messages)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_report, "FIRST_SECONDS", 0.1)


def test_lines_come_at_growing_intervals(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(wait_report, "monotonic", lambda: now)
    report, at = WaitReport("rank 1 of 2", Deadline(1800.0, 1800.0)), []
    for second in range(1801):
        now, before = float(second), len(caplog.messages)
        report.look(lambda: "rank 0 is missing")
        at += [second] * (len(caplog.messages) - before)
    assert at == [3 * 2**n for n in range(10)]
    expected = rf"nc10d: rank 1 of 2 has waited 3 s of 1800 s {HERE}: rank 0 is missing"
    assert re.fullmatch(expected, caplog.messages[0])


Waits = list[WaitReport]


def test_one_rank_of_a_host_speaks_for_those_that_wait_for_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(wait_report, "monotonic", lambda: now)

    def waiting(meeting: str) -> Waits:
        waiters = [f"rank {rank} of 17" for rank in range(16)]
        return [WaitReport(waiter, Deadline(60.0, 60.0), meeting) for waiter in waiters]

    def spoken(reports: Waits, until: int, missing: str = "rank 16 is missing") -> list[str]:
        nonlocal now
        before = len(caplog.messages)
        for second in range(int(now), until):
            now = float(second)
            for report in reports:
                report.look(lambda: missing)
        return [text.removeprefix("nc10d: ")[:7].strip() for text in caplog.messages[before:]]

    reports, others = waiting("a"), waiting("b")
    assert spoken(reports, 12) == ["rank 0"] * 2, "at 3 and 6 seconds"
    assert spoken(others, 13) == ["rank 0"], "another meeting has a speaker of its own"
    del reports[0]  # its wait is over: the next speaks
    assert spoken(reports, 60) == ["rank 1"] * 3


def test_ranks_that_miss_others_all_speak(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_report, "FIRST_SECONDS", 0.0)
    reports = [WaitReport(f"rank {rank} of 4", Deadline(60.0, 60.0)) for rank in range(4)]
    for report, missing in zip(reports, ["rank 7", "rank 7", "rank 8", "rank 8"], strict=True):
        report.look(lambda text=missing: text)  # type: ignore[misc]
    assert [text[-6:] for text in caplog.messages] == ["rank 7", "rank 8"]


def test_a_rank_that_dies_leaves_its_role() -> None:
    script = (
        "import os, sys, nc10d.base.wait_report as w; w.FIRST_SECONDS = 0.0; w.os.getppid = int\n"
        "w.WaitReport(sys.argv[1], w.Deadline(9.0, 9.0), 'a').look(lambda: '')\n"
        "os._exit(1)"
    )
    for rank in "01":
        done = subprocess.run([sys.executable, "-c", script, rank], capture_output=True, text=True)
        assert f"nc10d: {rank} has waited" in done.stderr


def test_a_program_without_logging_sees_lines_on_stderr() -> None:
    script = (
        "import nc10d.base.wait_report as w; w.FIRST_SECONDS = 1.0\n"
        "import nc10d; nc10d.init_process_group(init_method='tcp://127.0.0.1:0', rank=0,"
        " world_size=2, timeout=4)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    first = done.stderr.splitlines()[0]
    expected = (
        r"nc10d: rank 0 of 2 has waited [\d.]+ s of 4 s at <string>:2: "
        r"1 of 2 ranks came to TCPStore\(127\.0\.0\.1:\d+\); missing: 1 .*"
    )
    assert re.fullmatch(expected, first), done.stderr


@pytest.mark.usefixtures("soon")
def test_a_client_tells_why_it_has_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with pytest.raises(StoreTimeout):
            TCPStore("127.0.0.1", port, timeout=0.5)
    assert told(caplog, rf"client of store 127\.0\.0\.1:{port} has waited .* nobody listens there")


@pytest.mark.usefixtures("soon")
def test_a_server_that_says_nothing_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(StoreTimeout):
        TCPStore("127.0.0.1", mute.getsockname()[1], timeout=2.5)
    assert told(caplog, "something accepts connections there and says nothing")


def late(group: dist.ProcessGroup) -> str:
    if group.rank == 0:
        return ""
    with pytest.raises(RendezvousError) as caught:
        dist.new_group([0, 1], timeout=1)
    return str(caught.value)


@pytest.mark.usefixtures("soon")
def test_a_group_that_forms_tells_whom_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    text = run_ranks(late, 2)[1]
    assert re.search(rf"rank 1 timed out after 1 s {HERE}: rank 0 did not join", text)
    assert told(caplog, rf"rank 1 has waited .* {HERE}: rank 0 did not join the group 'world/1'")


@pytest.mark.usefixtures("soon")
def test_a_rank_that_does_not_get_ready_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    comes = meet, prefix_store("meeting/world", store), 1, 2, Deadline.after(9), 9.0
    with ThreadPoolExecutor(1) as pool, own_world():
        met = pool.submit(*comes)
        with pytest.raises(RendezvousError, match=r"timed out after .*: rank 1 came, and did not"):
            dist.init_process_group("cpu", store=store, rank=0, world_size=2, timeout=1.5)
        met.result()
    assert told(caplog, "rank 0 of 2 has waited .*: rank 1 came, and did not get ready")


class LateStore(HashStore):
    """A store in which the last key comes when its wait is over, while it is looked for."""

    def wait(self, keys, timeout=None):  # type: ignore[no-untyped-def]
        raise StoreTimeout("not there")

    def check(self, keys):  # type: ignore[no-untyped-def]
        found = super().check(keys)
        self.set("last", "")
        return found


def test_a_rank_that_comes_at_the_deadline_is_not_missing() -> None:
    """Neither is any other: a list of late ranks is never empty."""
    texts = []

    def missing(ranks: Sequence[int]) -> str:
        texts.append(f"{ranks_text(ranks)} did not come")
        return texts[-1]

    deadline = Deadline.after(0)
    await_ranks(LateStore(), ["last"], WaitReport("rank 0 of 1", deadline), missing, deadline)
    assert texts == []
    assert missing([]) == "a rank did not come"
    assert missing([3]) == "rank 3 did not come"
    assert missing([3, 5]) == "ranks 3, 5 did not come"
