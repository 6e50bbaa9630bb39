"""How the update of one copy is dealt to ranks: everything once, in fair parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpidist.optimizers.updates.one_copy import parts_of

LENGTHS = st.lists(st.integers(0, 50), max_size=12)


@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_every_element_belongs_to_one_rank(lengths, size, cuts):
    dealt = [part for rank in range(size) for part in parts_of(lengths, rank, size, cuts)]
    found = [(part.number, element) for part in dealt for element in range(part.start, part.stop)]
    assert found == [(number, element) for number, length in enumerate(lengths) for element in range(length)]


@given(LENGTHS, st.integers(1, 9))
def test_cut_parts_are_even(lengths, size):
    shares = [sum(part.stop - part.start for part in parts_of(lengths, rank, size, True)) for rank in range(size)]
    assert max(shares) - min(shares) <= 1


@given(LENGTHS, st.integers(1, 9))
def test_whole_parts_are_whole_and_as_even_as_that_allows(lengths, size):
    for rank in range(size):
        parts = parts_of(lengths, rank, size, False)
        assert all((part.start, part.stop) == (0, lengths[part.number]) for part in parts)
        assert sum(part.stop for part in parts) <= sum(lengths) / size + 1 + max(lengths, default=0)
