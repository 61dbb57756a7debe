"""A few rows in which every two values of any two parameters meet: all pairs, greedily.

Most bugs need two conditions together, seldom three. So a cover of all pairs finds nearly as many
bugs as all combinations (Kuhn, Wallace and Gallo, "Software Fault Interactions and Implications for
Software Testing", IEEE TSE 2004). The number of rows is near the product of the two longest
parameters.

>>> rows = pairwise({"os": ["linux", "mac"], "bits": [32, 64], "net": ["ip4", "ip6"]})
>>> len(rows) < 8
True
>>> {(row["os"], row["net"]) for row in rows} == {
...     (a, b) for a in ("linux", "mac") for b in ("ip4", "ip6")}
True
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Place = tuple[str, int]  # a parameter, and a value's index
Fits = Callable[[str, Any, str, Any], bool]
TRIES = 12
DEAD_ENDS = 200


def pairwise(
    parameters: Mapping[str, Sequence[object]], fits: Fits = lambda *_: True, seed: int = 0
) -> list[Row]:
    """Return rows that cover every pair of values for which `fits(name, value, name, value)`.

    Names reach `fits` in the order of `parameters`; the same seed gives the same rows. A value
    that fits no value of some other parameter is left out. ValueError if any other pair that fits
    can't join a row.
    """
    return _Cover(parameters, fits, random.Random(seed)).rows()


class _Cover:
    def __init__(
        self, parameters: Mapping[str, Sequence[Any]], fits: Fits, rng: random.Random
    ) -> None:
        self._values = _usable(parameters, fits)
        self._names = list(parameters)
        self._rng = rng
        self._fit = {
            frozenset(((one, i), (other, j)))
            for one, other in itertools.combinations(self._names, 2)
            for i, a in enumerate(self._values[one])
            for j, b in enumerate(self._values[other])
            if fits(one, a, other, b)
        }
        self._open = set(self._fit)

    def rows(self) -> list[Row]:
        """Add the best among a few random rows until nothing is left to cover."""
        rows = []
        pairs = sorted(self._open, key=sorted)
        self._rng.shuffle(pairs)
        for pair in pairs:
            if pair in self._open:
                tries = [self._row_with(pair) for _ in range(TRIES)]
                best = max(tries, key=lambda row: len(_pairs(row) & self._open))
                self._open -= _pairs(best)
                rows.append({name: self._values[name][best[name]] for name in self._names})
        return rows

    def _row_with(self, pair: frozenset[Place]) -> dict[str, int]:
        for _ in range(DEAD_ENDS):
            row = dict(sorted(pair))
            rest = [name for name in self._names if name not in row]
            self._rng.shuffle(rest)
            if all(self._extend(row, name) for name in rest):
                return row
        values = {name: self._values[name][index] for name, index in sorted(pair)}
        raise ValueError(f"no row can have {values}: other parameters have no value that fits")

    def _extend(self, row: dict[str, int], name: str) -> bool:
        """Give `name` the value that covers most and fits those in the row; False if none does."""
        best, gain = -1, -1.0
        for index in range(len(self._values[name])):
            pairs = [frozenset((place, (name, index))) for place in row.items()]
            if all(pair in self._fit for pair in pairs):
                new = sum(pair in self._open for pair in pairs) + self._rng.random() / 2
                best, gain = (index, new) if new > gain else (best, gain)
        row[name] = best
        return best >= 0


def _pairs(row: dict[str, int]) -> set[frozenset[Place]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def _usable(
    parameters: Mapping[str, Sequence[object]], fits: Fits
) -> Mapping[str, Sequence[object]]:
    """Leave out values until each fits some value of every other parameter."""
    names = list(parameters)

    def fit(one: str, a: object, other: str, b: object) -> bool:
        in_order = names.index(one) < names.index(other)
        return fits(one, a, other, b) if in_order else fits(other, b, one, a)

    def has_partners(name: str, value: object) -> bool:
        others = (other for other in names if other != name)
        return all(any(fit(name, value, o, b) for b in parameters[o]) for o in others)

    kept = {name: [v for v in parameters[name] if has_partners(name, v)] for name in names}
    same = all(len(kept[name]) == len(parameters[name]) for name in names)
    return kept if same else _usable(kept, fits)
