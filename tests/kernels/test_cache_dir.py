"""The cache folder is private, or another is taken; the lock excludes, ends and dies well."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from nc10d.kernels import cache_dir


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    cache_dir._root.cache_clear()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir(mode=0o700)
    yield
    cache_dir._root.cache_clear()


def test_the_folder_asked_for_is_made_private(monkeypatch, tmp_path):
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / "code"))
    made = cache_dir.code_folder(cache_dir.SOURCES, ("1",))
    assert made.parent == tmp_path / "code"
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_without_a_wish_it_lies_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("NC10D_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir.code_folder((), ()).parent == tmp_path / "xdg" / "nc10d"


def test_other_parts_and_other_sources_have_other_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / "code"))
    asked = [(cache_dir.SOURCES, ("1",)), (cache_dir.SOURCES, ("2",)), (("ops.py",), ("1",))]
    assert len({cache_dir.code_folder(*each) for each in asked}) == 3


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_open_to_others_is_not_used(mode, monkeypatch, tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(mode)
    monkeypatch.setenv("NC10D_CACHE_DIR", str(loose))
    with pytest.warns(RuntimeWarning, match="open to others"):
        made = cache_dir.code_folder((), ())
    assert made.parent == tmp_path / "tmp" / f"nc10d-{os.geteuid()}"
    assert list(loose.iterdir()) == []


def test_a_file_or_a_link_in_its_place_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file", "file/below"):
        cache_dir._root.cache_clear()
        monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / name))
        with pytest.warns(RuntimeWarning, match="not used"):
            assert cache_dir.code_folder((), ()).is_relative_to(tmp_path / "tmp")


def test_a_folder_of_another_user_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        made = cache_dir.code_folder((), ())
    assert made.parent.parent == tmp_path / "tmp"


def test_a_folder_that_others_may_replace_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / "open" / "code"))
    with pytest.warns(RuntimeWarning, match="lets others replace"):
        cache_dir.code_folder((), ())


def test_the_lock_excludes_and_is_given_up_at_its_limit(tmp_path):
    path = tmp_path / "lock"
    with cache_dir.exclusive(path) as first:
        assert first
        with cache_dir.exclusive(path, limit=0.05) as second:
            assert not second
    # The waiter that gave up gets the lock late, and releases it.
    with cache_dir.exclusive(path, limit=30) as third:
        assert third


def test_a_waiter_gets_the_lock_when_it_is_let_go(tmp_path):
    path, order = tmp_path / "lock", []
    wants = threading.Event()

    def wait():
        wants.set()
        with cache_dir.exclusive(path) as held:
            order.append(("waiter", held))

    with cache_dir.exclusive(path):
        thread = threading.Thread(target=wait)
        thread.start()
        wants.wait()
        order.append("holder")
    thread.join()
    assert order == ["holder", ("waiter", True)]


HOLD = """
import sys
from pathlib import Path
from nc10d.kernels.cache_dir import exclusive
with exclusive(Path(sys.argv[1])) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def test_a_killed_holder_lets_go(tmp_path):
    path = tmp_path / "lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], **pipes) as holder:
        assert holder.stdout.readline() == b"True\n"
        with cache_dir.exclusive(path, limit=0.05) as held:
            assert not held
        holder.send_signal(signal.SIGKILL)
        with cache_dir.exclusive(path, limit=30) as held:
            assert held


def test_without_a_place_for_the_lock_work_goes_on(tmp_path):
    with cache_dir.exclusive(tmp_path / "missing" / "lock") as held:
        assert not held


TAKE = """
import sys
from pathlib import Path
from nc10d.kernels.cache_dir import take_for_life
print(take_for_life(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_a_lock_for_life_is_free_when_its_process_has_ended(tmp_path):
    path = tmp_path / "lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", TAKE, str(path)], **pipes) as first:
        assert first.stdout.readline() == b"True\n"
        assert not cache_dir.take_for_life(path)
        first.send_signal(signal.SIGKILL)
    assert cache_dir.take_for_life(path)
    assert cache_dir.take_for_life(tmp_path / "missing" / "lock")
