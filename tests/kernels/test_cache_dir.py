"""No other user can write to the cache folder in use; the lock excludes, ends and dies well."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.kernels import cache_dir


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    forget()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir(mode=0o700)
    yield
    forget()


def forget():
    cache_dir.roots.cache_clear()
    cache_dir._throw_away.cache_clear()


def test_the_folder_asked_for_is_made_private(monkeypatch, tmp_path):
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / "code"))
    made = cache_dir.code_folder(cache_dir.SOURCES, ("1",))
    assert made.parent == tmp_path / "code"
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_the_default_folder_lies_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("NC10D_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir.code_folder((), ()).parent == tmp_path / "xdg" / "nc10d"


def test_other_parts_and_other_sources_have_other_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / "code"))
    few = ("ops/reductions.py",)
    asked = [(cache_dir.SOURCES, ("1",)), (cache_dir.SOURCES, ("2",)), (few, ("1",))]
    assert len({cache_dir.code_folder(*each) for each in asked}) == 3


@pytest.mark.parametrize("mode", [0o775, 0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_not_used(mode, monkeypatch, tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(mode)
    monkeypatch.setenv("NC10D_CACHE_DIR", str(loose))
    with pytest.warns(RuntimeWarning, match="lets others write"):
        made = cache_dir.code_folder((), ())
    assert made.parent == tmp_path / "tmp" / f"nc10d-{os.geteuid()}"
    assert list(loose.iterdir()) == []


def test_a_file_in_its_place_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        forget()
        monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / name))
        with pytest.warns(RuntimeWarning, match="not used"):
            assert cache_dir.code_folder((), ()).is_relative_to(tmp_path / "tmp")


def test_a_link_is_followed_once_to_a_folder_that_is_safe(monkeypatch, tmp_path):
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / "link"))
    assert cache_dir.code_folder((), ()).parent == tmp_path / "real"


@pytest.mark.parametrize("below", ["code", "between/code"])
def test_a_folder_below_one_that_others_may_write_to_is_not_used(below, monkeypatch, tmp_path):
    (tmp_path / "open" / "between").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / "open" / below))
    with pytest.warns(RuntimeWarning, match="open lets others write"):
        cache_dir.code_folder((), ())


def test_what_a_read_only_folder_holds_is_used_and_the_rest_lies_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path / "image"))
    held = cache_dir.code_folder(("ops/reductions.py",), ("held",))
    forget()

    def mkdir(path, *_, **options):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    real = Path.mkdir
    monkeypatch.setattr(
        Path, "mkdir", lambda p, *a, **k: (mkdir if "image" in str(p) else real)(p, *a, **k)
    )
    assert cache_dir.code_folder(("ops/reductions.py",), ("held",)) == held
    missing = cache_dir.code_folder(("ops/reductions.py",), ("missing",))
    assert missing.parent == tmp_path / "tmp" / f"nc10d-{os.geteuid()}"


def test_where_nothing_can_be_written_the_folder_is_missing(monkeypatch):
    def refuse(*_, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    def nowhere():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.delenv("NC10D_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    assert not cache_dir.code_folder((), ()).exists()


def test_the_folder_that_was_looked_at_is_used_although_a_link_is_swapped(monkeypatch, tmp_path):
    mine, theirs, link = (tmp_path / name for name in ("mine", "theirs", "link"))
    for folder in (mine, theirs):
        folder.mkdir(mode=0o700)
    link.symlink_to(mine)
    monkeypatch.setenv("NC10D_CACHE_DIR", str(link / "cache"))
    look = cache_dir.weakness

    def swap(*arguments):
        """Look, as another user whose folder holds the link swaps the link."""
        found = look(*arguments)
        link.unlink()
        link.symlink_to(theirs)
        return found

    monkeypatch.setattr(cache_dir, "weakness", swap)
    assert cache_dir.code_folder((), ()).parent == mine / "cache"


def test_a_link_in_the_place_of_the_folder_of_code_is_not_followed(monkeypatch, tmp_path):
    monkeypatch.setenv("NC10D_CACHE_DIR", str(tmp_path))
    code = cache_dir.code_folder((), ())
    (tmp_path / "other").mkdir(mode=0o700)
    code.rmdir()
    code.symlink_to(tmp_path / "other")
    assert cache_dir.code_folder((), ()).parent != tmp_path


ROOT, ME, OTHER = 0, 1000, 1001
parts = st.tuples(
    st.sampled_from([ROOT, ME, OTHER]),
    st.sampled_from([0o700, 0o755, 0o775, 0o707, 0o1777, 0o1755, 0o500]),
    st.sampled_from([stat.S_IFDIR, stat.S_IFDIR, stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK]),
)


@given(st.lists(parts, max_size=4), st.sampled_from([ROOT, ME]), st.sampled_from([ROOT, 65534]))
def test_a_path_is_trusted_if_only_this_user_and_root_can_change_it(below, user, owner):
    path = [(owner, 0o755, stat.S_IFDIR), *below]
    stats = [
        (f"part {i}", os.stat_result((kind | mode, 0, 0, 0, uid, 0, 0, 0, 0, 0)))
        for i, (uid, mode, kind) in enumerate(path)
    ]
    safe = all(
        kind == stat.S_IFDIR
        and uid in (user, ROOT, owner)
        and (not mode & 0o022 or (mode & stat.S_ISVTX and i < len(path) - 1))
        for i, (uid, mode, kind) in enumerate(path)
    )
    assert (cache_dir.weakness(stats, user) is None) == safe


def test_the_lock_excludes_and_is_given_up_at_its_limit(tmp_path):
    path = tmp_path / "lock"
    with cache_dir.exclusive(path) as first:
        assert first
        with cache_dir.exclusive(path, limit=0.05) as second:
            assert not second
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
