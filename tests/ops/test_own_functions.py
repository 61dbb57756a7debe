"""What ranks compare of a function, and that no later change reaches it."""

import enum
import types
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from nc10d.ops.own_reductions import own_reduction

Function = Callable[..., Any]


def digest(function: Function, key: object = 0) -> str:
    return own_reduction({"step": function}, lambda place: None, "", None, key).digest


def written(source: str, **names: Any) -> Function:
    """Return the function f from source, as if from another module with these globals."""
    exec(source, names)
    function: Function = names["f"]
    return function


def closed_over(value: Any) -> Function:
    return lambda a, b: a + b * value


PLAIN = "def f(a, b):\n    return a + b * n\n"
DIFFERENT: dict[str, tuple[Function, Function]] = {
    "a constant": (lambda a, b: a + 1, lambda a, b: a + 2),
    "an operation": (lambda a, b: a + b, lambda a, b: a - b),
    "an attribute": (lambda a, b: a.x, lambda a, b: a.y),
    "a value in the closure": (closed_over(1), closed_over(1.0)),
    "a zero's sign": (closed_over(0.0), closed_over(-0.0)),
    "an array": (closed_over(np.zeros(2)), closed_over(np.ones(2))),
    "a tuple": (closed_over((1, 2)), closed_over((2, 1))),
    "a global": (written(PLAIN, n=1), written(PLAIN, n=2)),
    "a function that it calls": (
        written("def f(a, b): return g(a)", g=lambda x: x + 1),
        written("def f(a, b): return g(a)", g=lambda x: x + 2),
    ),
    "a default": (lambda a, b, c=1: a, lambda a, b, c=2: a),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_digest_tells_functions_apart(what: str) -> None:
    one, other = DIFFERENT[what]
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


class Constants(enum.IntEnum):
    ONE = 1


UNKNOWN: dict[str, Function] = {
    "a module": written("def f(a, b): return a + m.pi", m=types),
    "a class": written("def f(a, b): return a + m.ONE", m=Constants),
    "a member": closed_over(Constants.ONE),
    "an object": closed_over(object()),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_values_that_may_differ_unseen_are_refused(what: str) -> None:
    with pytest.raises(TypeError, match="which ranks can't compare: give it the values"):
        digest(UNKNOWN[what])


def test_random_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="ranks would not agree"):
        digest(lambda a, b: a if np.random.rand() < 0.5 else b)


def test_a_function_inside_may_read_globals() -> None:
    source = "def f(a, b):\n    return (lambda x: x * n)(a)\n"
    own = own_reduction({"step": written(source, n=3)}, lambda place: None, "", None, 0)
    assert own.functions["step"](2, 0) == 6
    assert digest(written(source, n=3)) != digest(written(source, n=4))


def test_functions_that_call_each_other_are_refused() -> None:
    source = "def f(a, b): return g(a, b)\ndef g(a, b): return f(b, a)\n"
    with pytest.raises(TypeError, match="call each other"):
        digest(written(source))


def test_a_digest_does_not_depend_on_the_place() -> None:
    moved = written("\n\n\n" + PLAIN, n=3, unused=object())
    assert digest(moved) == digest(written(PLAIN, n=3))
    assert digest(moved, "f4") != digest(moved, "f8")


def test_a_function_is_frozen() -> None:
    names = {"n": 1, "g": lambda x: x}
    exec("def f(a, b):\n    return a + b * n + g(0)\n", names)
    own = own_reduction({"step": names["f"]}, lambda place: None, "", None, 0)
    names["n"] = 50
    names["g"] = lambda x: 50
    assert own.functions["step"](1, 1) == 2


def test_a_recursive_function_keeps_its_own_copy() -> None:
    source = "def f(a, b):\n    return a if b == 0 else f(a + 1, b - 1)\n"
    own = own_reduction({"step": written(source)}, lambda place: None, "", None, 0)
    step = own.functions["step"]
    assert isinstance(step, FunctionType)
    assert step(1, 3) == 4
    assert step.__globals__["f"] is step
