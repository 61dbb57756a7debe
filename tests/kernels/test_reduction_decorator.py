"""What `@reduction` takes for elements and for an identity."""

import types
from typing import Any

import numpy as np
import pytest

import nc10d

Best = np.dtype([("score", "f4"), ("token", "i4")])
Row = np.dtype([("m", "f8", (3,))])


def of(dtype: Any, **options: Any) -> Any:
    return nc10d.reduction(dtype, **options)(lambda a, b: a).pairwise.own


def test_without_a_dtype_the_error_says_how_to_give_one() -> None:
    with pytest.raises(TypeError, match=r"needs the elements' dtype: @nc10d.reduction\('f4'\)"):
        nc10d.reduction(lambda a, b: a)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "float8_e5m2"])
def test_torchs_dtypes_are_known(name: str) -> None:
    torch = pytest.importorskip("torch")
    assert of(getattr(torch, name)).digest == of(name).digest


def test_bytes_between_fields_are_in_no_digest() -> None:
    padded = np.dtype([("a", "u1"), ("b", "f8")], align=True)
    tables = [np.full(4, byte, np.uint8).repeat(16).view(padded) for byte in (1, 2)]
    for table in tables:
        table["a"], table["b"] = 3, 4.0

    def found(table: Any) -> str:
        own: Any = nc10d.reduction("f8", identity=0)(lambda a, b: a + table[1].b).pairwise.own
        return str(own.digest)

    assert found(tables[0]) == found(tables[1])
    digests = {of(padded, identity=table[0]).digest for table in tables}
    assert len(digests) == 1


def test_arrays_that_a_function_reads_are_frozen() -> None:
    table = np.array([1.0, 2.0])
    op = nc10d.reduction("f8")(lambda a, b: a + table[1])
    own = op.pairwise.own
    assert own is not None
    table[1] = 100.0
    assert own.functions["step"](1.0, 0.0) == 3.0


KEPT: list[tuple[Any, Any, Any]] = [
    ("f4", 0.1, np.float32(0.1)),
    ("f4", -np.inf, -np.inf),
    ("f4", np.nan, np.nan),
    ("u8", 2**64 - 1, 2**64 - 1),
    ("i4", np.int64(3), 3),
    ("?", 0, False),
    (Best, (np.nan, 7), (np.nan, 7)),
    (Best, np.array((0.1, 7), Best), (np.float32(0.1), 7)),
    (Best, 0, (0.0, 0)),
    (Row, ([1, 2, 3],), ([1.0, 2.0, 3.0],)),
]


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_an_identity_is_an_element(case: Any) -> None:
    dtype, given, kept = case
    found = of(dtype, identity=given).identity
    assert found.shape == ()
    assert repr(found) == repr(np.array(kept, dtype))


WRONG: list[tuple[Any, Any]] = [
    ("i4", 1.5),
    ("i4", np.nan),
    ("i4", 2**40),
    ("u1", -1),
    ("?", 2),
    ("f4", 1e300),
    ("f4", "none"),
    ("f4", 1j),
    ("f4", [1, 2]),
    (Best, (1,)),
    (Best, (1, 2, 3)),
    (Best, (1.0, 1.5)),
    (Best, [1, 2]),
    (Row, ((1, 2),)),
    (Row, types),
]


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_an_identity_that_is_no_element_is_refused(case: Any) -> None:
    dtype, given = case
    with pytest.raises(ValueError, match="identity must be an element of"):
        of(dtype, identity=given)
