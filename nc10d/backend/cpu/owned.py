"""Parts that use their owner without keeping it: an owner that is dropped goes at once."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Owned(Generic[Owner]):
    """What an owner has and calls; it is alive while it does."""

    __slots__ = ("_reference",)

    def __init__(self, owner: Owner) -> None:
        self._reference = weakref.ref(owner)

    @property
    def _owner(self) -> Owner:
        owner = self._reference()
        assert owner is not None, "it is the one who calls"
        return owner
