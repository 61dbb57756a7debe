"""The lint rule for except clauses: a clause that forgets signals' handlers is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.handlers import Clauses, kinds, unlisted

ROOT = Path(__file__).parents[2]
CLAUSES = {
    "except OSError:\n  x = None": True,
    "except TimeoutError:\n  pass": True,
    "except (KeyError, ConnectionResetError):\n  pass": True,
    "except Exception as error:\n  x = str(error)": True,
    "except errors.StoreError as error:\n  raise ValueError(error) from error": True,
    "except raised_here(OSError):\n  pass": False,
    "except KeyError:\n  pass": False,
    "except CodecError:\n  pass": False,
    "except OSError:\n  close()\n  raise": False,
    "except Exception as error:\n  fail(error)": False,
    "except Exception as error:\n  x = error": False,
}


@pytest.mark.parametrize("clause", CLAUSES)
def test_a_clause_that_ends_an_error_of_a_handler_is_found(clause: str) -> None:
    def places(block: str, decorator: str = "") -> list[str]:
        lines = f"{decorator}\ndef function():\n try:\n  {block}\n {clause}\n".replace(
            "\n  ", "\n   "
        )
        found = Clauses(lines, kinds()).found
        return [*unlisted("store/somewhere.py", found, set())]

    assert bool(places("read()")) == CLAUSES[clause]
    assert not places("x = 1"), "nothing is called, so no handler runs"
    assert not places("read()", "@off_main")


def test_suppressed_errors_are_found_and_uses_are_counted() -> None:
    source = (
        "with contextlib.suppress(OSError):\n  read()\nwith suppress_here(OSError):\n  read()\n"
    )
    clauses = Clauses(source, kinds())
    assert clauses.found == [(1, ())]
    assert clauses.uses == 1


def test_files_folders_and_functions_of_the_lists_may_have_clauses() -> None:
    found = [(3, ("_state", "inner"))]
    for path in ("kernels/new.py", "backend/cpu/memory/peer_access.py"):
        assert not [*unlisted(path, found, set())]
    assert [*unlisted("store/tcp.py", found, set())] == [
        "nc10d/store/tcp.py:3: name the errors by raised_here, or see tools/handlers.py"
    ]


def test_the_package_keeps_the_rule() -> None:
    done = subprocess.run([sys.executable, "tools/handlers.py"], cwd=ROOT, stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stdout.decode()
