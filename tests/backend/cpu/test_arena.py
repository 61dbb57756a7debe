"""The arena: pieces are zeroed, disjoint and reserved, and all of them can be freed."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.backend.cpu.memory.arena import PAGE, Arena, ArenaMapping

ARENA_BYTES = 64 * PAGE


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(ARENA_BYTES)
    yield made
    made.close()


def test_pieces_are_zeroed_even_when_they_were_used_before(arena: Arena) -> None:
    first = arena.allocate(3 * PAGE)
    arena.mapping.data[first : first + 3 * PAGE] = 7
    arena.free(first)
    again = arena.allocate(2 * PAGE)
    assert again == first
    assert not arena.mapping.data[again : again + 2 * PAGE].any()


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.one_of(st.integers(0, 20 * PAGE), st.integers(-8, -1)), min_size=1, max_size=40
    )
)
def test_pieces_never_overlap_and_all_memory_is_free_again(steps: list[int]) -> None:
    arena = Arena(ARENA_BYTES)
    mine: list[tuple[int, int]] = []
    for step in steps:
        if step < 0:
            if mine:
                offset, _ = mine.pop(step % len(mine))
                arena.free(offset)
            continue
        need = max(1, -(-step // PAGE)) * PAGE
        try:
            offset = arena.allocate(step)
        except MemoryError:
            continue
        assert offset % PAGE == 0
        assert offset + need <= ARENA_BYTES
        assert all(offset + need <= low or low + size <= offset for low, size in mine)
        mine.append((offset, need))
        assert arena.used() == sum(size for _, size in mine)
    for offset, _ in mine:
        arena.free(offset)
    assert arena.allocate(ARENA_BYTES) == 0, "the holes have become one again"
    arena.close()


def test_unallocated_address_space_takes_no_memory() -> None:
    arena = Arena(1 << 34)
    arena.allocate(10 * PAGE)
    assert os.fstat(arena.fd).st_blocks * 512 < 64 * PAGE
    arena.close()


def held(arena: Arena) -> int:
    """Return the bytes that an arena takes from the system."""
    return os.fstat(arena.fd).st_blocks * 512


def test_the_memory_of_a_dead_array_goes_back_to_the_system_and_its_neighbours_stay(
    arena: Arena,
) -> None:
    arrays = [arena.allocate_array(4 * PAGE + 1) for _ in range(3)]
    for value, x in enumerate(arrays, 1):
        x[:] = value
    before = held(arena)
    del arrays[1], x
    assert held(arena) == before - 5 * PAGE
    assert [(x == value).all() for x, value in zip(arrays, (1, 3), strict=True)] == [True, True]
    assert not arena.allocate_array(5 * PAGE).any(), "the place is used again"


def test_a_private_array_dies_without_a_word(arena: Arena) -> None:
    first, second = (arena.allocate_array(2 * PAGE) for _ in range(2))
    second[:] = 2
    arena.retire()
    arena.make_private(0, 2 * PAGE)
    del first
    assert (second == 2).all()


def test_a_forked_child_takes_no_memory_from_its_parent(arena: Arena) -> None:
    x = arena.allocate_array(2 * PAGE)
    x[:] = 7
    child = os.fork()
    if not child:
        del x
        os._exit(0)
    os.waitpid(child, 0)
    assert (x == 7).all()


def test_allocating_too_much_is_a_memory_error_and_loses_nothing(arena: Arena) -> None:
    with pytest.raises(MemoryError, match="one piece"):
        arena.allocate(ARENA_BYTES + 1)
    assert arena.allocate(ARENA_BYTES) == 0


def test_a_full_memory_file_system_is_a_memory_error_and_not_a_crash_later(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(MemoryError, match="No space left"):
            arena.allocate(PAGE)
    assert arena.used() == 0
    assert arena.allocate(ARENA_BYTES) == 0


def test_the_memfd_cannot_be_shrunk_and_has_no_name(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, PAGE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:nc10d")
    assert not os.get_inheritable(arena.fd)


def test_mappings_outlive_the_descriptor_and_see_the_same_memory() -> None:
    arena = Arena(ARENA_BYTES)
    offset = arena.allocate(PAGE)
    other = ArenaMapping(arena.fd)
    arena.close()
    arena.close()
    other.words(offset, 1)[0] = 41
    assert arena.mapping.words(offset, 1)[0] == 41
    assert other.base != arena.mapping.base


def test_a_mapping_goes_with_its_last_view() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:nc10d" in line for line in maps)

    gc.collect()  # the memory that other tests left
    before = mapped()
    arena = Arena(ARENA_BYTES)
    view = arena.mapping.words(arena.allocate(8 * PAGE), 4)
    arena.close()
    del arena
    gc.collect()
    assert mapped() == before + 1, "a view keeps its memory"
    view[:] = np.arange(4)
    del view
    gc.collect()
    assert mapped() == before


def test_private_pages_keep_their_contents_and_get_no_more_writes(arena: Arena) -> None:
    before, mine = arena.allocate(PAGE), arena.allocate(4 * PAGE)
    late = ArenaMapping(arena.fd)  # as another process sees it
    arena.mapping.data[mine : mine + 4 * PAGE] = 7
    assert arena.retire() == mine + 4 * PAGE
    arena.make_private(mine + PAGE, 2 * PAGE)
    late.data[before : mine + 4 * PAGE] = 9
    seen = arena.mapping.data[mine : mine + 4 * PAGE].reshape(4, PAGE)
    assert [set(page.tolist()) for page in seen] == [{9}, {7}, {7}, {9}]


def test_retired_memory_goes_back_to_the_system_and_is_not_allocated_again(arena: Arena) -> None:
    first, second = arena.allocate(4 * PAGE), arena.allocate(PAGE)
    arena.free(second)
    floor = arena.retire()
    assert floor == first + 4 * PAGE
    before = os.fstat(arena.fd).st_blocks
    arena.free(first)
    assert arena.used() == 0
    assert before - os.fstat(arena.fd).st_blocks == 4 * PAGE // 512
    assert arena.retire() == floor
    assert arena.allocate(PAGE) >= floor
