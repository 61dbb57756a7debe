"""Dates and times are carried whole, or refused."""

import datetime as dt
import zoneinfo

import pytest

from nc10d.codec import encode
from nc10d.errors import CodecError

VALUES = [
    dt.date(2026, 11, 26),
    dt.time(12, 30, 1, 5),
    dt.datetime(2026, 11, 26, 13, 5, 7, 11),
    dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
    dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=-3, seconds=7))),
    dt.timedelta(days=-3, microseconds=7),
    dt.timezone(dt.timedelta(minutes=90)),
    dt.timezone(dt.timedelta(hours=1), "CET"),
    dt.time(12, 30, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_time_comes_back_the_same_inside_a_container(value):
    message = encode({"at": [value, b"x"]})
    back = message.envelope().open(message.flat())["at"][0]
    assert back == value
    assert type(back) is type(value)
    assert getattr(back, "tzinfo", None) == getattr(value, "tzinfo", None)
    assert repr(back) == repr(value)  # zones are equal if their offsets are


@pytest.mark.parametrize(
    "value",
    [
        dt.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        dt.datetime(2026, 1, 2, fold=1),
    ],
    ids=["zone", "fold"],
)
def test_a_time_that_a_text_would_change_is_refused(value):
    with pytest.raises(CodecError, match=r"with a datetime\.timezone, or as UTC"):
        encode(value)
