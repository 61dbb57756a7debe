"""Group control: all members decide the same, whichever members are dead, asleep or late."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from control_groups import ControlGroup

from nc10d.backend.cpu.control import group_control
from nc10d.backend.cpu.control.group_control import suspects
from nc10d.errors import StoreTimeout


def without(*ranks: int) -> str:
    return json.dumps({"without": ranks})


def test_all_members_decide_the_same_proposed_value() -> None:
    with ControlGroup(4) as group, ThreadPoolExecutor(4) as pool:
        values = [f"of {rank}" for rank in range(4)]
        decided = pool.map(
            lambda member: member.control.decide("x", f"of {member.rank}"), group.members
        )
        decisions = {*decided}
        assert len(decisions) == 1
        assert decisions < {*values}


def test_topics_are_independent_and_members_join_without_a_proposal() -> None:
    with ControlGroup(3) as group:
        assert group.members[1].control.decide("x", "first") == "first"
        assert group.members[2].control.decide("x", "second") == "first"
        assert group.members[2].control.decide("y", "third") == "third"


def test_a_rank_that_the_value_expects_to_be_silent_is_dismissed_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_control, "PATIENCE", 1e6)
    with ControlGroup(3, asleep=(0,)) as group:
        assert group.members[1].control.decide("x", without(0)) == without(0)


def test_a_silent_rank_is_dismissed_after_the_patience() -> None:
    with ControlGroup(4, asleep=(0, 2)) as group:
        assert group.members[1].control.decide("x", "of 1") == "of 1"
        group.members[0].wake_up()
        group.members[2].wake_up()
        assert group.members[0].control.decide("x", "of 0") == "of 1"
        assert group.members[2].control.decide("x", "of 2") == "of 1"


def test_a_rank_that_wakes_after_the_others_have_left_decides_as_they_did() -> None:
    with ControlGroup(3, asleep=(0,)) as group:
        assert group.members[1].control.decide("x", without(0)) == without(0)
        for member in group.members[1:]:
            member.control.decide("x", "late")
            member.control.leave(())
            member.die()
        group.members[0].control.propose("x", without(1, 2))
        group.members[0].wake_up()
        assert group.members[0].control.decide("x", "") == without(0)


def test_a_dead_rank_is_dismissed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_control, "PATIENCE", 1e6)
    with ControlGroup(3, asleep=(0, 1)) as group, ThreadPoolExecutor(1) as pool:
        decided = pool.submit(group.members[2].control.decide, "x", "of 2")
        group.members[0].die()
        group.members[1].die()
        assert decided.result(30) == "of 2"


def test_members_read_published_values_and_wait_for_them() -> None:
    with ControlGroup(3) as group:
        first, other = group.members[0].control, group.members[2].control
        first.set("key/0", "text")
        other.wait(["key/0"], 30.0)
        assert other.multi_get(["key/0"]) == [b"text"]
        assert not other.check(["key/0", "key/1"])
        with pytest.raises(StoreTimeout, match="key/1"):
            other.wait(["key/1"], 0.01)


@pytest.mark.parametrize(
    "value", ["", "[]", "3", "{}", '{"fields": {}}', '{"without": 3}', "[" * 9]
)
def test_a_value_without_ranks_suspects_no_rank(value: str) -> None:
    assert suspects(value) == []
