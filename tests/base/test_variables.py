"""Misspelt variables and values without meaning are told once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

import nc10d
from nc10d.base import variables
from nc10d.base.variables import VARIABLES, problems


@pytest.mark.parametrize("name", VARIABLES)
def test_a_letter_too_few_names_the_variable(name: str) -> None:
    misspelt = name[:-1]
    if misspelt not in VARIABLES:
        (problem,) = problems({misspelt: "1"})
        assert problem == f"{misspelt} is not a variable of nc10d; {name} is"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("NC10D_TOKENFILE", "x", "NC10D_TOKENFILE is not a variable of nc10d; NC10D_TOKEN_FILE is"),
        ("NC10D_QQ", "x", "NC10D_QQ is not a variable of nc10d (docs/environment.md lists them)"),
        ("NC10D_INSECURE", "yes", "NC10D_INSECURE='yes' has no meaning: it may be 0 or 1"),
        ("NC10D_STORE_TCP", "0", "NC10D_STORE_TCP='0' has no meaning: it may be 1"),
        ("NC10D_CMA", "off", "NC10D_CMA='off' has no meaning: it may be 0 or 1"),
        (
            "NC10D_NCCL_HEARTBEAT",
            "1m",
            "NC10D_NCCL_HEARTBEAT='1m' has no meaning: it may be a number of seconds",
        ),
    ],
)
def test_the_sentence_says_what_is_wrong(name: str, value: str, problem: str) -> None:
    assert list(problems({name: value, "PATH": "x"})) == [problem]


@pytest.mark.parametrize("name", VARIABLES)
def test_known_variables_are_fine(name: str) -> None:
    assert list(problems({name: "1"})) == list(problems({name: ""})) == []


@pytest.fixture
def fresh() -> Iterator[None]:
    variables.warn_once.cache_clear()
    yield
    variables.warn_once.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_init_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "NC10D_CAM": "0"})
    os.environ.pop("NC10D_RESTART_COUNT", None)
    for _ in range(2):
        nc10d.init_process_group("fake", rank=0, world_size=2, store=nc10d.HashStore())
        nc10d.destroy_process_group()
    told = [r for r in caplog.records if "NC10D_CAM" in r.getMessage()]
    assert [(r.name, r.levelno) for r in told] == [("nc10d", logging.WARNING)]
    assert told[0].getMessage().endswith("; NC10D_CMA is")
