"""Functions by value: code, globals, closures and defaults arrive; what cannot is named."""

import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from nc10d.codec.functions import dumps
from nc10d.testing import run_ranks

FACTOR = 7


def sent(value: Any) -> Any:
    return pickle.loads(dumps(value))


def test_a_function_arrives_with_its_variables() -> None:
    offset = 3

    def inner(x: int, more: int = 2, *, last: int = 1) -> int:
        return x * FACTOR + offset + more + last

    def outer(n: int) -> list[int]:
        return [inner(i) for i in range(n)]

    copy = sent(outer)
    assert copy is not outer
    assert copy(3) == outer(3)
    assert copy.__qualname__ == outer.__qualname__


def test_a_function_may_call_itself() -> None:
    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    assert sent(factorial)(5) == 120


def test_what_can_be_imported_goes_by_name() -> None:
    assert sent(sent) is sent
    assert sent(threading.Thread) is threading.Thread


def test_a_variable_that_cannot_be_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # the same where it is installed
    lock = threading.Lock()

    def locked() -> None:
        with lock:
            pass

    with pytest.raises(TypeError, match=r"locked cannot be sent .*: it uses lock, a lock"):
        dumps(locked)

    class Inner:
        pass

    with pytest.raises(TypeError, match=r"class .*Inner cannot be sent .*install cloudpickle"):
        dumps(lambda: Inner())


REPL = """
from nc10d.testing import run_ranks
scale = 3
def scaled(group):
    return int(group.rank) * scale

print(run_ranks(scaled, 2, "processes"))
"""


@pytest.mark.slow
def test_ranks_of_a_repl_and_of_a_lambda_run_as_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=REPL, capture_output=True, text=True, check=True
    )
    assert "[0, 3]" in done.stdout, done.stderr
    shift = 5
    assert run_ranks(lambda group: int(group.rank) + shift, 2, "processes") == [5, 6]
