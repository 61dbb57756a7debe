"""Records whose fields lie in arrays of their own: `(values, indices)` in place of records.

`with_fields(op)` replaces each tuple in a reduction by Fields, which `as_buffer` describes as an
array of records that is not contiguous. A backend copies the fields to contiguous records before
the operation, and written ones back behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer, register
from nc10d.arrays.dtypes import RecordType, element_of
from nc10d.ops import Array, Op, ReduceOp
from nc10d.ops.facts import FACTS


class Fields:
    """An array for each field in `element`; a field that is an array is the last dimension.

    `buffers` describe the arrays' memory.
    """

    __slots__ = ("arrays", "buffers", "element")

    def __init__(self, arrays: Sequence[Array], element: RecordType) -> None:
        self.arrays, self.element = tuple(arrays), element
        self.buffers = [as_buffer(x) for x in self.arrays]

    @property
    def count(self) -> int:
        """How many records there are."""
        return self.buffers[0].count // self.element.fields[0].count

    def records(self) -> np.ndarray[Any, Any]:
        """Return contiguous records with these fields, copied from arrays in host memory."""
        whole = np.empty(self.count, self.element.numpy)
        self._copy(whole, back=False)
        return whole

    def assign(self, records: np.ndarray[Any, Any]) -> None:
        """Copy the records' fields to the arrays."""
        self._copy(records, back=True)

    def _copy(self, records: np.ndarray[Any, Any], back: bool) -> None:
        for field, x in zip(self.element.fields, self.buffers, strict=True):
            part = records[field.name]
            view = x.as_numpy().reshape(part.shape, copy=False)
            np.copyto(*((view, part) if back else (part, view)))

    def map(self, replace: Callable[[Any], Any]) -> Fields:
        """Return the fields with each array x replaced by `replace(x)`."""
        return Fields(map(replace, self.arrays), self.element)  # type: ignore[arg-type]


def with_fields(op: Op) -> Op:
    """Return a reduction with its tuples as Fields; other operations unchanged."""
    facts = FACTS[type(op)]
    how = getattr(op, "op", None)
    if type(how) is not ReduceOp:
        return op
    try:
        joined = {name: records_of(getattr(op, name), how) for name in facts.arrays}
    except (TypeError, ValueError) as error:
        error.args = (f"{facts.name}: {error}",)
        raise
    return facts.replace(op, **joined)


def records_of(x: Any, how: ReduceOp) -> Any:
    """Return the Fields for a tuple, if a reduction has such elements; other arrays unchanged.

    TypeError or ValueError for arrays that can't be the reduction's fields.
    """
    if how.pairwise.own is None or not isinstance(x, (list, tuple)):
        return x
    if x and isinstance(x[0], (list, tuple)):  # an array of records for each rank
        return [records_of(each, how) for each in x]
    return _fields(x, how)


def _fields(arrays: Sequence[Array], how: ReduceOp) -> Fields:
    """Return the fields that a reduction sees in arrays; TypeError or ValueError for others."""
    own, buffers = how.pairwise.own, [as_buffer(x) for x in arrays]
    assert own is not None, "the caller has looked"
    if len({x.device for x in buffers}) > 1:
        devices = ", ".join(x.device for x in buffers)
        raise TypeError(f"{how.name}: the arrays must be on one device, not on {devices}")
    places = [(x.dtype.numpy, x.shape[-1] if x.shape else 1) for x in buffers]
    element = element_of(own.element(*places)) if places else None
    if not isinstance(element, RecordType) or len(element.fields) != len(arrays):
        raise TypeError(
            f"{how.name} reduces {own.takes}, not {len(arrays)} arrays with a field each"
        )
    counts = [x.count // f.count for x, f in zip(buffers, element.fields, strict=True)]
    if len(set(counts)) > 1:
        held = " and ".join(map(str, counts))
        raise ValueError(f"{how.name}: the arrays hold {held} records, and must hold equally many")
    return Fields(arrays, element)


def _resolve(x: Fields) -> Buffer:
    first, count, strides = x.buffers[0], x.count, (x.element.itemsize,)
    writable = all(each.writable for each in x.buffers)
    return Buffer(
        first.address, count, x.element, first.device, x, writable, False, (count,), strides
    )


def parts_of_buffer(x: Buffer) -> list[Buffer]:
    """Return the arrays that a buffer describes: the fields, or the buffer itself."""
    return x.owner.buffers if isinstance(x.owner, Fields) else [x]


register(Fields, _resolve, lambda x: x.buffers[0].device)
