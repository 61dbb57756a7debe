"""A council: all decide the same over their lines, whoever is dead, asleep, or late."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from circles import Circle

from nc10d.backend.cpu.control import group_control
from nc10d.backend.cpu.control.group_control import suspects
from nc10d.errors import StoreTimeout


def without(*ranks: int) -> str:
    return json.dumps({"without": ranks})


def test_all_decide_one_of_the_values_that_were_proposed() -> None:
    with Circle(4) as circle, ThreadPoolExecutor(4) as pool:
        values = [f"of {rank}" for rank in range(4)]
        told = pool.map(lambda seat: seat.council.decide("x", f"of {seat.rank}"), circle.seats)
        decisions = {*told}
        assert len(decisions) == 1
        assert decisions < {*values}


def test_topics_are_decided_each_for_itself_and_ranks_take_part_unasked() -> None:
    with Circle(3) as circle:
        assert circle.seats[1].council.decide("x", "first") == "first"
        assert circle.seats[2].council.decide("x", "second") == "first"
        assert circle.seats[2].council.decide("y", "third") == "third"


def test_who_may_be_silent_is_not_given_all_of_the_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_control, "PATIENCE", 1e6)
    with Circle(3, asleep=(0,)) as circle:
        assert circle.seats[1].council.decide("x", without(0)) == without(0)


def test_who_is_silent_for_no_reason_is_waited_for_and_then_done_without() -> None:
    with Circle(4, asleep=(0, 2)) as circle:
        assert circle.seats[1].council.decide("x", "of 1") == "of 1"
        circle.seats[0].wake_up()
        circle.seats[2].wake_up()
        assert circle.seats[0].council.decide("x", "of 0") == "of 1"
        assert circle.seats[2].council.decide("x", "of 2") == "of 1"


def test_who_wakes_up_when_all_others_have_left_still_decides_as_they_did() -> None:
    with Circle(3, asleep=(0,)) as circle:
        assert circle.seats[1].council.decide("x", without(0)) == without(0)
        for seat in circle.seats[1:]:
            seat.council.decide("x", "late")
            seat.council.leave(())
            seat.die()
        circle.seats[0].council.propose("x", without(1, 2))
        circle.seats[0].wake_up()
        assert circle.seats[0].council.decide("x", "") == without(0)


def test_a_death_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_control, "PATIENCE", 1e6)
    with Circle(3, asleep=(0, 1)) as circle, ThreadPoolExecutor(1) as pool:
        decided = pool.submit(circle.seats[2].council.decide, "x", "of 2")
        circle.seats[0].die()
        circle.seats[1].die()
        assert decided.result(30) == "of 2"


def test_what_is_told_is_read_by_all_and_waited_for() -> None:
    with Circle(3) as circle:
        one, other = circle.seats[0].council, circle.seats[2].council
        one.set("key/0", "text")
        other.wait(["key/0"], 30.0)
        assert other.multi_get(["key/0"]) == [b"text"]
        assert not other.check(["key/0", "key/1"])
        with pytest.raises(StoreTimeout, match="key/1"):
            other.wait(["key/1"], 0.01)


@pytest.mark.parametrize(
    "value", ["", "[]", "3", "{}", '{"fields": {}}', '{"without": 3}', "[" * 9]
)
def test_a_value_that_says_nothing_about_silence_suspects_nobody(value: str) -> None:
    assert suspects(value) == []
