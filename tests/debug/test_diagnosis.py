"""Diagnosis of dumps: exactly the missing, different or late ranks are named."""

from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.debug import timeline, torch_trace
from nc10d.debug.__main__ import main, read
from nc10d.debug.diagnosis import MOST_ROWS, diagnose, report
from nc10d.group.flight_recorder import COMPLETED, STARTED, Dump, Entry

CALL = "all_reduce(dtype=float64, count=4, op=SUM)"


def dump(rank: int, size: int = 3, last: int = 7, call: str = CALL, why: str = "asked for") -> Dump:
    """Return a rank's dump: in call number `last`, with the earlier calls completed."""
    entries = [Entry(seq, CALL, COMPLETED) for seq in range(max(1, last - 3), last)]
    entries.append(Entry(last, call, STARTED))
    return Dump("world", rank, size, [*range(size)], "host", 100 + rank, 1.0, why, entries=entries)


def test_ranks_in_step_are_clean() -> None:
    diagnosis = diagnose([dump(rank) for rank in range(3)])
    assert diagnosis.clean
    assert "in step" in report([dump(rank) for rank in range(3)])


@given(size=st.integers(2, 8), data=st.data())
def test_the_rank_without_a_dump_is_missing(size: int, data: st.DataObject) -> None:
    absent = data.draw(st.integers(0, size - 1))
    diagnosis = diagnose([dump(rank, size) for rank in range(size) if rank != absent])
    assert diagnosis.missing == [absent]
    assert not diagnosis.clean


@given(size=st.integers(2, 8), data=st.data())
def test_a_rank_behind_the_others_is_late(size: int, data: st.DataObject) -> None:
    late = data.draw(st.integers(0, size - 1))
    diagnosis = diagnose([dump(rank, size, 6 if rank == late else 7) for rank in range(size)])
    assert (diagnosis.late, diagnosis.missing, diagnosis.different) == ([late], [], None)


@given(size=st.integers(2, 8), data=st.data())
def test_a_rank_with_another_call_is_different(size: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, size - 1))
    calls = ["barrier" if rank == odd else CALL for rank in range(size)]
    diagnosis = diagnose([dump(rank, size, call=calls[rank]) for rank in range(size)])
    others = [rank for rank in range(size) if rank != odd]
    assert diagnosis.different == (7, {"barrier": [odd], CALL: others})


def flooded(rank: int, waits_for: int | None) -> Dump:
    """A dump in call 7 of which messages of other groups have overwritten the record."""
    step = {"waits_for": waits_for, "last": {rank: 7}}
    return Dump("world", rank, 3, [0, 1, 2], "host", 100 + rank, 1.0, "asked for", **step)


def test_a_rank_whose_record_is_overwritten_is_as_far_as_it_knows_itself() -> None:
    dumps = [dump(0), dump(1), flooded(2, 0)]
    diagnosis = diagnose(dumps)
    assert diagnosis.clean
    assert diagnosis.last == dict.fromkeys(range(3), 7)
    assert "#7      a call that the record has no more" in report(dumps)


@pytest.mark.parametrize(("waits_for", "completed"), [(0, 6), (None, 7)])
def test_torchs_analyser_gets_the_same(waits_for: int | None, completed: int) -> None:
    status = torch_trace.record([flooded(2, waits_for)])["pg_status"]["world"]
    assert status["last_enqueued_collective"] == 7
    assert status["last_completed_collective"] == completed


def test_calls_before_the_oldest_in_the_record_have_ended() -> None:
    late = flooded(2, 0)
    late.entries.append(Entry(7, CALL, STARTED))
    assert torch_trace.record([late])["pg_status"]["world"]["last_completed_collective"] == 6
    assert torch_trace.record([dump(0)])["pg_status"]["world"]["last_completed_collective"] == 6


def test_the_failed_rank_is_the_first_of_the_missing() -> None:
    dumps = [dump(rank, 5) for rank in (0, 3)]
    lost = Dump(
        **{**{f: getattr(dumps[0], f) for f in Dump.__slots__}, "failed": 4, "why": "PeerLost"}
    )
    assert diagnose([lost, dumps[1]]).missing == [4, 1, 2]


def test_a_later_dump_of_a_rank_replaces_the_one_before() -> None:
    old, new = dump(0, 2, last=3), dump(0, 2, last=7)
    late = Dump(**{**{f: getattr(new, f) for f in Dump.__slots__}, "written": 2.0})
    assert diagnose([late, old, dump(1, 2)]).clean


def test_a_thousand_ranks_fit_on_a_screen_with_those_that_stand_out() -> None:
    dumps = [dump(rank, 1000, 6 if rank == 777 else 7) for rank in range(1000) if rank != 555]
    text = report(dumps)
    assert len(text.splitlines()) < MOST_ROWS + 8
    assert "rank 555 left no dump" in text
    assert re.search(r"rank 777 .*#6", text)


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        (tmp_path / f"world-rank{rank}.json").write_text(dump(rank, why="<PeerLost>").to_json())
    page, image, folder = tmp_path / "page.html", tmp_path / "page.png", tmp_path / "torch"
    files = ["--html", str(page), "--png", str(image), "--torch", str(folder)]
    assert main([str(tmp_path), *files]) == 1
    assert image.read_bytes().startswith(b"\x89PNG")
    assert "missing    rank 1 left no dump" in capsys.readouterr().out
    html = page.read_text()
    assert "no call has a time" in html
    assert "&lt;PeerLost&gt;" in html
    assert "<PeerLost>" not in html
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0", "rank_2"]
    assert timeline.html_page(read(tmp_path)) == html


def test_a_picture_without_matplotlib_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.json").write_text(dump(0).to_json())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(tmp_path), "--png", str(tmp_path / "x.png")]) == 2
    assert 'a PNG needs matplotlib: pip install ".[bench]" in a checkout' in capsys.readouterr().err


def test_without_dumps_the_diagnosis_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    (tmp_path / "x.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "x.json: not" in capsys.readouterr().err


VALID = json.loads(dump(0).to_json())


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format": ' + "[" * 100_000,
        "\0",
        *(
            json.dumps(VALID | {name: value})
            for name, value in [
                ("rank", "0"),
                ("rank", 7),
                ("size", 10**12),
                ("size", True),
                ("ranks", ["0"]),
                ("written", "now"),
                ("written", math.nan),
                ("clock", 10**40),
                ("failed", [1]),
                ("group", 5),
                ("why", None),
                ("last", {"0": "1"}),
                ("last", [1]),
                ("entries", [{"seq": "1", "call": "all_reduce()", "state": "completed"}]),
                ("entries", [5]),
                ("traffic", [{"direction": "to", "peer": "1", "count": 0, "waits": False}]),
            ]
        ),
    ],
)
def test_a_file_that_is_no_dump_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "x.json").write_text(text)
    assert main([str(tmp_path), "--html", str(tmp_path / "x.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "x.json: " in line
    assert len(line) < 300


def test_an_output_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.json").write_text(dump(0).to_json())
    assert main([str(tmp_path), "--html", str(tmp_path / "nowhere" / "x.html")]) == 2
    assert "nowhere" in capsys.readouterr().err


def timed(rank: int, *entries: Entry) -> Dump:
    """A dump of a rank, written when its clock stood at 1 s; an hour ahead of the clocks of day."""
    return Dump("world", rank, 2, [0, 1], "host", 1, 3601.0, "why", clock=10**9, entries=[*entries])


def test_the_timeline_has_a_bar_for_each_call_from_its_begin_to_its_end() -> None:
    done = Entry(1, CALL, COMPLETED, 0 + 10**8, 3 * 10**8, "train.py:41")
    late = Entry(1, CALL, COMPLETED, 2 * 10**8, 3 * 10**8, "train.py:41")
    going = Entry(2, CALL, STARTED, 5 * 10**8, 0, "<train>.py:42")
    sent = Entry(1, "send(dst=1)", COMPLETED, 4 * 10**8, 5 * 10**8, message=True)
    svg = timeline.timeline([timed(0, done, sent, going), timed(1, late)])
    bars = re.findall(r'class="(\w+)(?: message)?" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', svg)
    shown = [(kind, float(x), float(width)) for kind, x, _, width in bars if kind != "row"]
    left, full = 80, 1120 / 0.9  # pixels for a second
    expected = [
        ("completed", 0.0, 0.2),
        ("completed", 0.3, 0.1),
        ("started", 0.4, 0.5),
        ("completed", 0.1, 0.1),
    ]
    for (kind, x, width), (wanted, begin, lasts) in zip(shown, expected, strict=True):
        assert kind == wanted
        assert (x, width) == pytest.approx((left + begin * full, lasts * full), abs=0.1)
    assert "at &lt;train&gt;.py:42, started" in svg
    assert "<train>" not in svg


def test_torchs_entries_have_lines_and_times_and_messages() -> None:
    sent = Entry(3, "send(dtype=int64, count=2, dst=1, tag=4)", COMPLETED, 10, 20, "a b.py:7", True)
    got = Entry(3, "recv(dtype=int64, count=2, src=0, tag=4)", COMPLETED, 10, 30, "", True)
    there, here = (
        torch_trace.record([timed(r, e)])["entries"][0] for r, e in ((0, sent), (1, got))
    )
    assert there["frames"] == [{"name": "", "filename": "a b.py", "line": 7}]
    assert here["frames"] == []
    assert there["profiling_name"] == "gloo:send 0->1"
    assert here["profiling_name"] == "gloo:recv 1<-0"
    assert there["input_sizes"] == here["output_sizes"] == [[2]]
    assert there["is_p2p"]
    assert there["time_created_ns"] == pytest.approx(3_600_000_000_010, abs=1000)
    assert there["time_discovered_completed_ns"] - there["time_created_ns"] == 10


def test_torchs_analyser_finds_the_culprit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    calls = [CALL, "broadcast(dtype=float64, count=4, root=0)", CALL]
    dumps = [dump(rank, call=call) for rank, call in enumerate(calls)]
    dumps[0].entries.insert(
        1, Entry(1, "send(dtype=int64, count=2, dst=1)", COMPLETED, message=True)
    )
    dumps[1].entries.insert(
        1, Entry(1, "recv(dtype=int64, count=2, src=0)", COMPLETED, message=True)
    )
    paths = torch_trace.write(dumps, tmp_path)
    assert pickle.loads(paths[1].read_bytes())["entries"][-1]["state"] == STARTED
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path)]
    done = subprocess.run(
        [*command, "--prefix", "rank_"], capture_output=True, text=True, check=False
    )
    assert "Culprit rank 1" in done.stdout + done.stderr, done.stderr
