"""Pictures of programs: every step of a walk is drawn, and fits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.model import draw, predict
from benchmarks.model.collective_programs import MAKERS, Collective, layout_of, spread
from nc10d.backend.cpu.program.program import StepKind

pytest.importorskip("matplotlib")


def collective(op: str, nbytes: int, size: int, local_size: int) -> Collective:
    return Collective(op, nbytes, layout_of(spread(size, local_size)))


@pytest.mark.parametrize("op", sorted(MAKERS))
@pytest.mark.parametrize(("size", "local_size"), [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_every_collective_can_be_drawn(op: str, size: int, local_size: int, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    draw.draw(collective(op, 1 << 20, size, local_size), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("op", sorted(MAKERS))
def test_every_step_that_moves_bytes_is_a_box(op: str) -> None:
    for size, local_size in ((2, 2), (4, 4), (6, 2)):
        for event in draw.walked(collective(op, 200_000, size, local_size)).events:
            if event.nbytes:
                assert draw.look(event.step, event.rank % local_size) in draw.LOOKS


@pytest.mark.parametrize("op", sorted(MAKERS))
def test_boxes_of_a_row_do_not_overlap(op: str) -> None:
    drawn = collective(op, 200_000, 6, 2)
    rows: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for box in draw.boxes(draw.walked(drawn).events, drawn.hosts):
        strip = box.look is draw.GIVE  # of its own
        rows.setdefault((box.rank, strip), []).append((box.begin, box.end))
    assert rows
    for intervals in rows.values():
        for (_, end), (begin, _) in pairwise(sorted(intervals)):
            assert begin >= end - 1e-9


def test_an_arrow_begins_at_a_signal_and_ends_when_its_wait_does() -> None:
    events = draw.walked(collective("all_reduce", 64 << 10, 4, 4)).events
    given = {(e.rank, e.end) for e in events if e.step.kind is StepKind.SIGNAL}
    waits = [e for e in events if e.step.kind in (StepKind.WAIT, StepKind.MEET_ALL)]
    assert len(waits) == 4 * (1 + 3)
    for event in waits:
        assert event.causes
        assert all(cause in given and cause[1] < event.end for cause in event.causes)


def test_the_command_prints_the_path_of_the_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.png"
    words = ["broadcast", "--hosts", "2x2", "--bytes", "4096", "--out", str(path)]
    assert predict.main("draw", words) == 0
    assert capsys.readouterr().out.strip() == str(path)
    assert path.exists()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (8, "8 B"),
        (64 << 10, "64 KiB"),
        (1 << 10, "1 KiB"),
        (3 << 19, "1.5 MiB"),
        (1 << 30, "1 GiB"),
    ],
)
def test_sizes_are_labelled_for_people(nbytes: int, text: str) -> None:
    assert figures.bytes_label(nbytes) == text
