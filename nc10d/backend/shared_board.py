"""A board: memory by which a host's ranks follow each other's launches on other devices.

The backend that detects failures gives each rank a board of zeros, which its peers on the host can
read; a backend for another device fills them. Between hosts the same backend carries small texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class GroupMessages(Protocol):
    """Texts under keys that members of a group publish; see cpu.control.group_control."""

    on_value: Callable[[int, str, str], None]
    """Called as on_value(rank, key, value) for each text that comes; must not block."""

    def set(self, key: str, value: str, to: Sequence[int] | None = None) -> None:
        """Publish a text to all members, or to the ranks `to`; never blocks."""

    def value(self, key: str) -> str | None:
        """Return the latest text of a key, None if none has come."""

    def until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Block until `ready()` or for `timeout` seconds; return whether it is ready."""


class PeerBoard(NamedTuple):
    """A local peer's board: at `base` + the word at the address `word`, minus 1; 0: none."""

    rank: int
    word: int
    base: int


class SharedBoard(NamedTuple):
    """This rank's board at `address`, and the boards of its local peers.

    `partners` are ranks on other hosts, one for each host. If each rank compares its calls with its
    peers' and its partners' calls, all ranks of the group are compared.
    """

    address: int
    peers: tuple[PeerBoard, ...]
    partners: tuple[int, ...]
