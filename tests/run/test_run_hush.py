"""Ctrl-C during imports: what is left out of a rank's output, and what is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from nc10d.run.traceback_filter import hushed

TRACEBACK = b"Traceback (most recent call last):\n"
IN_SCRIPT = TRACEBACK + b'  File "t.py", line 9, in step\n    x @ y\nKeyboardInterrupt\n'
IN_IMPORT = (
    TRACEBACK
    + b'  File "t.py", line 1, in <module>\n    import numpy as np\n'
    + b'  File "numpy/x.py", line 7, in f\n\nKeyboardInterrupt\n'
)
IN_MACHINERY = (
    TRACEBACK + b'  File "<frozen importlib._bootstrap>", line 3, in f\nKeyboardInterrupt'
)
AT_START = b"Fatal Python error: init_import_site: no\nPython runtime state: initialized\n"
LAZILY = TRACEBACK + b'  File "/lib/importlib/__init__.py", line 1, in import_module\n    g()\nKeyb'


@pytest.mark.parametrize("text", [IN_IMPORT, IN_MACHINERY, AT_START, LAZILY])
def test_tracebacks_out_of_imports_are_left_out(text: bytes) -> None:
    assert hushed(text) == b""
    assert hushed(b"saved\n" + text) == b"saved\n"
    assert hushed(IN_SCRIPT + text) == IN_SCRIPT


@pytest.mark.parametrize(
    "link",
    [
        b"\nDuring handling of the above exception, another exception occurred:\n\n",
        b"\nThe above exception was the direct cause of the following exception:\n\n",
    ],
)
def test_so_is_what_they_are_chained_to(link: bytes) -> None:
    cause = TRACEBACK + b'  File "enum.py", line 2, in f\n    x[3]\nKeyError: 3\n'
    assert hushed(b"saved\n" + cause + link + IN_IMPORT) == b"saved\n"
    assert hushed(cause + link + IN_SCRIPT) == cause + link + IN_SCRIPT
    assert hushed(b"saved\nException ignored in: <x>\n" + IN_IMPORT) == b"saved\n"


@pytest.mark.parametrize("text", [b"", b"import this\n", b"    import x\n", IN_SCRIPT, b"y" * 99])
def test_everything_else_stays(text: bytes) -> None:
    assert hushed(text) == text


def test_what_follows_such_a_traceback_is_the_interpreter_ending() -> None:
    advice = b"IMPORTANT: READ THIS\n\nIt may be:\n  * a broken installation\n"
    assert hushed(b"hello\n" + IN_IMPORT + advice) == b"hello\n"
    assert hushed(advice) == advice


FINALISER = dedent("""
    import sys

    class Half:
        def __init__(self) -> None:
            raise SystemExit(3)

        def __del__(self) -> None:
            self.whole

    print("before", file=sys.stderr)
    try:
        Half()
    except SystemExit:
        print("after", file=sys.stderr)
    1 / 0
""")


def test_what_finalisers_say_of_objects_that_are_half_made_is_left_out() -> None:
    """llvmlite's, where Ctrl-C finds a compilation; where a script stood is still shown."""
    text = subprocess.run([sys.executable, "-c", FINALISER], stderr=-1, check=False).stderr
    assert b"Exception ignored" in text
    assert b"'whole'" in text
    shown = hushed(text)
    assert shown.startswith(b"before\nafter\nTraceback")
    assert shown.endswith(b"division by zero\n")
    assert hushed(text[text.index(b"Exc") : text.index(b"after")].rstrip()) == b""


@pytest.mark.parametrize(
    "hang", ["import slow", "from slow import (\n    x,\n)", "__import__('slow')"]
)
def test_python_says_it_in_these_words(tmp_path: Path, hang: str) -> None:
    """The patterns are guesses about an interpreter: this one is asked."""
    (tmp_path / "slow.py").write_text("import signal\nprint('up', flush=True)\nsignal.pause()\n")
    (tmp_path / "script.py").write_text(hang + "\n")
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=-1, stderr=-1, encoding=None
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[1]
    assert text.startswith(TRACEBACK)
    assert hushed(text) == (text if "__" in hang else b"")


def test_where_a_script_hung_is_shown(tmp_path: Path) -> None:
    script = dedent("""
        import signal

        def step():
            print("up", flush=True)
            signal.pause()

        step()
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[1]
    assert b"in step" in hushed(text)
