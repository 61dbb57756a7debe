"""Ctrl-C during imports: which tracebacks of a rank are dropped, and which are kept."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from nc10d.run.output import without_import_tracebacks

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
def test_tracebacks_out_of_imports_are_dropped(text: bytes) -> None:
    assert without_import_tracebacks(text) == b""
    assert without_import_tracebacks(b"saved\n" + text) == b"saved\n"
    assert without_import_tracebacks(IN_SCRIPT + text) == IN_SCRIPT


@pytest.mark.parametrize(
    "link",
    [
        b"\nDuring handling of the above exception, another exception occurred:\n\n",
        b"\nThe above exception was the direct cause of the following exception:\n\n",
    ],
)
def test_tracebacks_chained_to_import_tracebacks_are_dropped(link: bytes) -> None:
    cause = TRACEBACK + b'  File "enum.py", line 2, in f\n    x[3]\nKeyError: 3\n'
    assert without_import_tracebacks(b"saved\n" + cause + link + IN_IMPORT) == b"saved\n"
    assert without_import_tracebacks(cause + link + IN_SCRIPT) == cause + link + IN_SCRIPT
    assert (
        without_import_tracebacks(b"saved\nException ignored in: <x>\n" + IN_IMPORT) == b"saved\n"
    )


@pytest.mark.parametrize("text", [b"", b"import this\n", b"    import x\n", IN_SCRIPT, b"y" * 99])
def test_all_other_text_stays(text: bytes) -> None:
    assert without_import_tracebacks(text) == text


def test_text_after_such_a_traceback_is_dropped_too() -> None:
    advice = b"IMPORTANT: READ THIS\n\nIt may be:\n  * a broken installation\n"
    assert without_import_tracebacks(b"hello\n" + IN_IMPORT + advice) == b"hello\n"
    assert without_import_tracebacks(advice) == advice


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


def test_tracebacks_of_finalisers_are_dropped() -> None:
    """Ctrl-C amid a compilation makes llvmlite's finalisers fail; the script's traceback stays."""
    text = subprocess.run([sys.executable, "-c", FINALISER], stderr=-1, check=False).stderr
    assert b"Exception ignored" in text
    assert b"'whole'" in text
    shown = without_import_tracebacks(text)
    assert shown.startswith(b"before\nafter\nTraceback")
    assert shown.endswith(b"division by zero\n")
    assert (
        without_import_tracebacks(text[text.index(b"Exc") : text.index(b"after")].rstrip()) == b""
    )


@pytest.mark.parametrize(
    "hang", ["import slow", "from slow import (\n    x,\n)", "__import__('slow')"]
)
def test_the_interpreter_writes_these_patterns(tmp_path: Path, hang: str) -> None:
    """The patterns are guesses about an interpreter: run this interpreter."""
    # Not signal.pause(): a signal that comes just before it would end no pause.
    hangs = "import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.05)\n"
    (tmp_path / "slow.py").write_text(hangs)
    (tmp_path / "script.py").write_text(hang + "\n")
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=-1, stderr=-1, encoding=None
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[1]
    assert text.startswith(TRACEBACK)
    assert without_import_tracebacks(text) == (text if "__" in hang else b"")


def test_the_place_where_a_script_hung_is_shown(tmp_path: Path) -> None:
    script = dedent("""
        import time

        def step():
            print("up", flush=True)
            while True:
                time.sleep(0.05)

        step()
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[1]
    assert b"in step" in without_import_tracebacks(text)
