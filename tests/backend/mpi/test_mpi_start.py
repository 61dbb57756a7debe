"""Programs on MPI start with the right ranks, report missing parts, and end without a hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mpi_launchers import LIBRARIES, MPICH, run_script

from nc10d.testing.hosts.external_ranks import Launcher

HEAD = """
import numpy as np, nc10d as dist
from mpi4py import MPI
"""


def said(launcher: Launcher, size: int, code: str, **variables: str) -> str:
    """Run a program that must succeed; return its output."""
    done = run_script(launcher, size, HEAD + code, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def alone(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` without a launcher."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


MEETS = """
dist.init_process_group("mpi", timeout=30)
world = MPI.COMM_WORLD
assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
x = np.full(4, world.rank + 1)
dist.all_reduce(x)
assert (x == sum(range(1, world.size + 1))).all()
store = dist.get_default_group().store
store.set(f"key{world.rank}", str(world.rank))
peer = (world.rank + 1) % world.size
assert store.get(f"key{peer}") == str(peer).encode()
dist.destroy_process_group()
dist.init_process_group("mpi", world_size=world.size)
dist.barrier()
print("fine")
"""


@pytest.mark.parametrize("launcher", LIBRARIES)
def test_mpi_gives_rank_and_world_size(launcher: Launcher) -> None:
    assert said(launcher, 3, MEETS).count("fine") == 3


def test_without_a_launcher_a_process_is_a_world_of_its_own() -> None:
    done = alone(HEAD + MEETS)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_more_ranks_than_mpi_has_are_an_error_that_names_mpirun() -> None:
    done = alone(HEAD + "dist.init_process_group('mpi', rank=0, world_size=2)")
    assert "RendezvousError" in done.stderr
    assert "mpirun" in done.stderr


@pytest.mark.parametrize("missing", ["mpi4py", "mpi4py.MPI"])
def test_without_mpi4py_the_error_names_the_extra(missing: str) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None\n"
    done = alone(hide + "import nc10d; nc10d.init_process_group('mpi')")
    assert "UnsupportedPlatform" in done.stderr
    assert "pip install mpi4py" in done.stderr


def test_a_named_library_that_is_no_mpi_is_the_subject_of_the_error() -> None:
    name = "import os; os.environ['MPI4PY_LIBMPI'] = '/nowhere/libmpi.so'\n"
    done = alone(name + "import nc10d; nc10d.init_process_group('mpi')")
    assert "UnsupportedPlatform" in done.stderr
    assert "MPI4PY_LIBMPI='/nowhere/libmpi.so'" in done.stderr


def test_ranks_of_other_launchers_are_not_a_world_each() -> None:
    launched = "import os; os.environ.update(RANK='1', WORLD_SIZE='3')\n"
    done = alone(launched + HEAD + MEETS)
    assert "RendezvousError: WORLD_SIZE is 3" in done.stderr
    assert "mpirun" in done.stderr
    meant = HEAD + "dist.init_process_group('mpi', rank=0, world_size=1); print('fine')"
    done = alone(launched + meant)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


TURNED = """
import sys
from nc10d.store import FileStore
world = MPI.COMM_WORLD
rank, size = world.size - 1 - world.rank, world.size - OMITTED
if rank < size:
    dist.init_process_group("mpi", store=FileStore(PATH), rank=rank, world_size=size, timeout=30)
    x = np.arange(2.0) + rank
    dist.broadcast(x, size - 1)
    assert x[0] == size - 1
    dist.destroy_process_group()
print("fine")
"""


@pytest.mark.parametrize("omitted", [0, 1])
def test_with_a_store_some_processes_form_a_group_in_an_order_of_their_own(
    tmp_path: Path, omitted: int
) -> None:
    code = TURNED.replace("OMITTED", str(omitted)).replace("PATH", repr(str(tmp_path / "store")))
    assert said(MPICH, 3, code).count("fine") == 3


THREADS = """
import mpi4py
mpi4py.rc.thread_level = LEVEL
import nc10d as dist
import numpy as np
dist.init_process_group("mpi", timeout=30)
sub = dist.new_group([1, 0])
x = np.ones(3)
work = sub.all_reduce(x, async_op=True)
dist.barrier()
work.wait()
assert (x == 2).all()
print("fine")
"""


@pytest.mark.parametrize("launcher", LIBRARIES)
def test_threads_that_must_take_turns_take_turns_with_a_warning(launcher: Launcher) -> None:
    done = run_script(launcher, 2, THREADS.replace("LEVEL", "'serialized'"))
    assert done.returncode == 0, done.stdout
    # A library may support a higher thread level than requested.
    assert done.stdout.count("fine") == 2
    assert "Traceback" not in done.stdout


def test_an_mpi_for_one_thread_is_refused() -> None:
    done = run_script(MPICH, 1, THREADS.replace("LEVEL", "'single'"))
    assert "UnsupportedPlatform" in done.stdout
    assert "thread_level" in done.stdout


DIES = """
dist.init_process_group("mpi", timeout=120)
x = np.ones(5, int)
dist.all_reduce(x)
if dist.get_rank() == 1:
    raise LookupError("a bug of the user's")
try:
    dist.all_reduce(x)
except dist.PeerLost as error:
    print("told:", error)
    raise SystemExit(0)
"""


@pytest.mark.parametrize("launcher", LIBRARIES)
def test_a_rank_that_waits_for_a_rank_that_raised_fails_at_once(launcher: Launcher) -> None:
    done = run_script(launcher, 3, HEAD + DIES)
    assert done.returncode != 0
    assert "a bug of the user's" in done.stdout
    # The launcher may end the other ranks before they print; but no rank waits for two minutes.


LEAVES = """
dist.init_process_group("mpi", timeout=30)
sub = dist.new_group([0, 1])
x = np.ones(300_000, int)
if dist.get_rank() < 2:
    works = [sub.all_reduce(x, async_op=True)]
if dist.get_rank() == 0:
    works += [sub.irecv(np.ones(2), 1, tag=7), sub.irecv(np.ones(2), None, tag=2**31 - 1)]
dist.barrier()
print("fine")
"""


@pytest.mark.parametrize("launcher", LIBRARIES)
def test_a_program_may_end_with_calls_in_flight(launcher: Launcher) -> None:
    assert said(launcher, 3, LEAVES).count("fine") == 3
