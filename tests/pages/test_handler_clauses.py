"""The lint rule for except clauses: a clause that forgets signals' handlers is found."""

from __future__ import annotations

import pytest

from tools import handlers
from tools.handlers import Clauses, kinds, unlisted

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


def test_the_package_keeps_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert handlers.main() == 0, capsys.readouterr().out


def test_more_uses_than_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handlers, "MOST", 3)
    assert handlers.main() == 1
    assert "uses of raised_here and suppress_here, more than 3" in capsys.readouterr().out
