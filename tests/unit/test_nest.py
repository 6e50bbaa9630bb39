"""Nested structures."""

from __future__ import annotations

from collections import namedtuple

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import given

from mpidist import nest

Pair = namedtuple("Pair", ["left", "right"])

structures = st.recursive(
    st.integers(),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), parts, max_size=3)
        | st.builds(Pair, parts, parts)
    ),
    max_leaves=12,
)


@given(structures)
def test_packing_the_leaves_gives_the_structure_back(structure):
    packed = nest.pack(structure, nest.flatten(structure))
    assert packed == structure
    assert repr(packed) == repr(structure)  # types and the order of dicts too


@given(st.dictionaries(st.text(max_size=2), st.integers(), max_size=5))
def test_the_order_in_which_a_dict_was_built_does_not_matter(built):
    assert nest.flatten(dict(reversed(built.items()))) == nest.flatten(built)


@given(structures)
def test_a_wrong_number_of_leaves(structure):
    leaves = nest.flatten(structure)
    with pytest.raises(ValueError, match="more leaves"):
        nest.pack(structure, [*leaves, 0])
    if leaves:
        with pytest.raises(ValueError, match="fewer leaves"):
            nest.pack(structure, leaves[1:])


def test_paths_of_leaves():
    structure = {"b": [1, Pair(2, {3: 3})], "a": 0, ("c", 1): 4}
    with pytest.raises(TypeError, match="cannot be sorted"):
        nest.with_paths(structure)
    del structure["c", 1]
    assert nest.with_paths(structure) == ([0, 1, 2, 3], ("['a']", "['b'][0]", "['b'][1].left", "['b'][1].right[3]"))


@pytest.mark.parametrize("key", ["a", 1, 2.5])
def test_keys_of_numpy_are_those_of_python(key):
    of_numpy = numpy.array([key])[0]
    assert list(nest._paths_of({of_numpy: 0})) == list(nest._paths_of({key: 0}))


@pytest.mark.parametrize("structure", [1, [1, 2], (1, 2), [], ()])
def test_what_has_no_paths(structure):
    assert nest.with_paths(structure) == (nest.flatten(structure), None)


@given(structures, structures)
def test_structures_of_other_paths_are_not_mixed_up(first, second):
    for each in (first, second, first):
        leaves, paths = nest.with_paths(each)
        assert leaves == nest.flatten(each)
        assert paths is None or paths == tuple(nest._paths_of(each))
