"""An uncaught error of nc10d is printed up to the user's line, and each sentence once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

import nc10d
from nc10d.arrays.arguments import array, check_reducible
from nc10d.base import uncaught
from nc10d.base.debug_level import DebugLevel, get_debug_level, set_debug_level
from nc10d.base.promise import copy_to_raise
from nc10d.base.text import join_words
from nc10d.errors import PeerLost

OWN = nc10d.__file__.replace("__init__.py", "")


def raised_by(act: Callable[[], object]) -> BaseException:
    with pytest.raises((PeerLost, ValueError, AttributeError, RuntimeError, TypeError)) as caught:
        act()
    return caught.value


def a_wrong_call() -> None:
    nc10d.get_default_group()


def test_the_frames_of_nc10d_are_left_out() -> None:
    text = uncaught.text_of(raised_by(a_wrong_call))
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "    nc10d.get_default_group()" in lines
    assert lines[-1].startswith("ValueError: there is no default process group")
    assert OWN not in text


def test_so_are_those_of_any_kind_that_nc10d_raises() -> None:
    text = uncaught.text_of(raised_by(lambda: nc10d.Future[int]().value()))
    assert text.endswith(
        "RuntimeError: this Future has no value yet: wait() for it, or attach with then()\n"
    )
    assert OWN not in text


def test_an_error_that_nc10d_does_not_raise_keeps_all_frames() -> None:
    """The line has no `raise`: it is a bug, which the frames show."""
    text = uncaught.text_of(raised_by(lambda: join_words([None, ""])))  # type: ignore[list-item]
    assert "in join_words" in text


def a_wrong_argument() -> None:
    check_reducible(array("call", "x", [1], written=False), nc10d.SUM)


def test_a_cause_that_ends_the_error_is_left_out() -> None:
    """`call: x: reason`, raised from `reason`."""
    error = raised_by(a_wrong_argument)
    assert str(error) != str(error.__cause__)
    text = uncaught.text_of(error)
    assert text.count("expected an array") == 1
    assert "direct cause" not in text


def short() -> NoReturn:
    try:
        raise KeyError(1)
    except KeyError as error:
        raise PeerLost("rank 1") from error


def test_a_cause_of_a_word_stays() -> None:
    assert "KeyError: 1" in uncaught.text_of(raised_by(short))


def test_a_wrong_level_in_the_environment_is_no_error_of_the_hook() -> None:
    code = "import nc10d; nc10d.init_process_group(rank=0, world_size=1)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NC10D_DEBUG": "details"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert run.stderr.splitlines()[-1].startswith("ValueError: NC10D_DEBUG must be one of OFF")
    assert "excepthook" not in run.stderr


LOST = PeerLost("rank 1 is lost")


def again() -> NoReturn:
    raise copy_to_raise(LOST)


def test_a_cause_that_repeats_the_error_is_left_out() -> None:
    text = uncaught.text_of(raised_by(again))
    assert text.count("rank 1 is lost") == 1
    assert "direct cause" not in text


def chained() -> NoReturn:
    try:
        a_wrong_call()
    except ValueError as error:
        raise PeerLost("rank 1 is lost") from error


def test_other_causes_stay_without_nc10ds_frames() -> None:
    text = uncaught.text_of(raised_by(chained))
    assert text.count("Traceback") == 2
    assert text.index("no default process group") < text.index("direct cause")
    assert OWN not in text


def through_nc10d() -> None:
    uncaught.text_of("no error")  # type: ignore[arg-type]


def test_frames_that_nc10d_calls_stay() -> None:
    """The innermost frame is the standard library's: what it does is told by all frames."""
    text = uncaught.text_of(raised_by(through_nc10d))
    assert "in text_of" in text


def installed() -> SimpleNamespace:
    """Return the hooks that nc10d installs in a program that has none; pytest has its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.__excepthook__)
        patch.setattr(threading, "excepthook", threading.__excepthook__)
        uncaught.install()
        return SimpleNamespace(excepthook=sys.excepthook, of_threads=threading.excepthook)


@pytest.mark.parametrize("level", DebugLevel)
def test_detail_keeps_all_frames(level: DebugLevel, capsys: pytest.CaptureFixture[str]) -> None:
    error = raised_by(a_wrong_call)
    before = get_debug_level()
    set_debug_level(level)
    try:
        installed().excepthook(type(error), error, error.__traceback__)
    finally:
        set_debug_level(before)
    assert (OWN in capsys.readouterr().err) == (level is DebugLevel.DETAIL)


def test_a_hook_of_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", print)
    uncaught.install()
    assert sys.excepthook is print


WAITING = """
import os, select, threading
import nc10d as dist

dist.init_process_group()
pids = [0, 0]
dist.all_gather_object(pids, os.getpid())
if dist.get_rank():  # outlives rank 0
    poller = select.poll()
    poller.register(os.pidfd_open(pids[0]), select.POLLIN)
    poller.poll()
else:
    group = dist.get_default_group()
    before = group.seq
    threading.Thread(target=dist.barrier, daemon=True).start()
    while group.seq == before:
        os.sched_yield()
"""


def test_a_daemon_thread_that_waits_as_the_program_ends_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    command = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", "2", "waiting.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_errors_of_threads_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for daemon in (True, False):
        thread = threading.Thread(target=a_wrong_call, daemon=daemon)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "excepthook", installed().of_threads)
            thread.start()
            thread.join()
        assert "there is no default process group" in capsys.readouterr().err
