"""The fixed tree over leaves: ranks' shares, their subtrees, and the order of additions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.ops.leaf_tree import join, leaf_tree, leaves_of, subtrees


def tree(leaves: range) -> str:
    """Return the whole tree over a subtree's leaves as text."""
    if len(leaves) == 1:
        return str(leaves.start)
    middle = leaves.start + len(leaves) // 2
    return f"({tree(range(leaves.start, middle))}+{tree(range(middle, leaves.stop))})"


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int]:
    leaves = 2 ** draw(st.integers(0, 8))
    return leaves, draw(st.integers(1, leaves))


def test_the_tree_by_hand() -> None:
    found = leaf_tree(8, 1, 3)
    assert found.mine == range(3, 6)
    assert [[(s.start, s.stop) for s in part] for part in found.subtrees] == [
        [(0, 2), (2, 3)],
        [(3, 4), (4, 6)],
        [(6, 8)],
    ]
    assert found.pairs == ((1, 2), (0, 1), (3, 4), (0, 3))
    assert tree(range(8)) == "(((0+1)+(2+3))+((4+5)+(6+7)))"


@given(worlds())
def test_shares_are_in_order_and_even(world: tuple[int, int]) -> None:
    leaves, size = world
    shares = [leaves_of(rank, size, leaves) for rank in range(size)]
    assert [leaf for share in shares for leaf in share] == list(range(leaves))
    counts = [len(share) for share in shares]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@given(worlds())
def test_any_number_of_ranks_adds_along_the_same_tree(world: tuple[int, int]) -> None:
    leaves, size = world
    shared = leaf_tree(leaves, 0, size)
    found = [tree(subtree) for each in shared.subtrees for subtree in each]
    assert shared.count == len(found)
    for left, right in shared.pairs:
        found[left] = f"({found[left]}+{found[right]})"
    assert found[0] == tree(range(leaves))


@given(worlds())
def test_subtrees_are_the_largest_in_a_range(world: tuple[int, int]) -> None:
    leaves, size = world
    for rank in range(size):
        share = leaves_of(rank, size, leaves)
        for part in subtrees(share):
            parent = part.start // (2 * len(part)) * 2 * len(part)
            assert len(part) & (len(part) - 1) == part.start % len(part) == 0
            assert parent < share.start or parent + 2 * len(part) > share.stop


@given(worlds())
def test_a_rank_holds_few_sums_at_a_time(world: tuple[int, int]) -> None:
    leaves, size = world
    for rank in range(size):
        held: list[range] = []
        for leaf in leaves_of(rank, size, leaves):
            join(held, range(leaf, leaf + 1))
            assert len(held) <= leaves.bit_length()  # log2(leaves) + 1


@pytest.mark.parametrize(("leaves", "size"), [(0, 1), (6, 2), (4, 5), (-8, 1)])
def test_other_numbers_are_errors(leaves: int, size: int) -> None:
    with pytest.raises(ValueError, match="leaves"):
        leaf_tree(leaves, 0, size)


def test_the_number_is_an_int() -> None:
    with pytest.raises(TypeError, match="leaves must be an int"):
        leaf_tree(2.0, 0, 1)  # type: ignore[arg-type]
