"""`group.rank` is an int, and callable as c10d's method; so are `size` and `name`."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nc10d as dist
from nc10d.base.callable_values import CallableInt, CallableStr
from nc10d.codec import encode
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import own_world
from nc10d.work import Future, Work


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    with own_world():
        dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=3)
        found = dist.GroupMember.WORLD
        assert found is not None
        yield found
        dist.destroy_process_group()


def test_rank_size_and_name_are_values_and_methods(group: ProcessGroup) -> None:
    assert (group.rank, group.size, group.name) == (1, 3, "world")
    assert (group.rank(), group.size(), group.name()) == (1, 3, "world")
    assert (dist.get_rank(group), dist.get_world_size(group)) == (1, 3)
    outside = dist.new_group([0])
    assert not isinstance(outside, ProcessGroup)
    assert outside is not None
    assert (outside.rank(), outside.size(), dist.get_rank(outside)) == (-1, -1, -1)
    plain = (dist.get_rank(), dist.get_world_size(), group.rank(), group.size(), group.name())
    assert [type(value) for value in plain] == [int, int, int, int, str]


COPIES: dict[str, Callable[[Any], Any]] = {
    "call": lambda value: value(),
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "json": lambda value: json.loads(json.dumps(value)),
}


@given(value=st.integers(-(2**40), 2**40) | st.text(), way=st.sampled_from([*COPIES]))
def test_a_copy_of_a_callable_value_is_plain_and_equal(value: int | str, way: str) -> None:
    one = CallableInt(value) if isinstance(value, int) else CallableStr(value)
    assert one == value
    assert (hash(one), repr(one), f"{one}") == (hash(value), repr(value), f"{value}")
    found = COPIES[way](one)
    assert found == value
    assert type(found) is type(value)


def test_objects_with_callable_values_can_be_sent() -> None:
    size, name = CallableInt(3), CallableStr("world")
    message = encode({name: [size, name], "list": [size] * 20})
    found = message.envelope().open(message.flat())
    assert found == {"world": [3, "world"], "list": [3] * 20}
    assert type(found["list"][0]) is int


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_groups_and_works_say_that_they_cannot_be_pickled(
    group: ProcessGroup, how: Callable[[Any], Any]
) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert isinstance(work, Work)
    for thing in (group, {"group": group}, work, [work], Future[int]()):
        if how is not copy.copy or not isinstance(thing, (dict, list)):
            with pytest.raises(TypeError, match="can't be pickled or copied: it belongs to this"):
                how(thing)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.float16, np.complex64])
def test_an_array_keeps_its_dtype_beside_a_rank(dtype: type) -> None:
    x, rank = np.ones(3, dtype), CallableInt(2)
    for result in (x + rank, rank + x, np.multiply(x, rank), x[0] * rank, rank * x[0]):
        assert result.dtype == dtype
    x += rank
    assert x.tolist() == [3, 3, 3]
