"""All ways of a bucket do the same: they reduce, scale, transform what a rank owns, and hand the values to targets."""

import numpy
import pytest

from mpidist.collectives.call import Call
from mpidist.collectives.persistent import Once
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.selection import Way
from mpidist.testing import ranks, run_ranks
from mpidist.world import world_communicator

#: Elements of float64 that fit into a segment of `run_ranks`, and such that take a place.
SHORT, LONG = 23, ranks._SEGMENT_BYTES // 8 + 5

#: By name: hosts of the ranks, the way, and the elements; without a way, in one step.
WAYS = {
    "one step": ("aaa", None, SHORT),
    "one step through places": ("aa", None, LONG),
    "one step in shares": ("aaa", None, LONG),
    "direct": ("aaa", Way("shared_memory", 64), LONG),
    "two levels": ("aabb", Way("two_level", 64), LONG),
    "ring": ("aaa", Way("ring"), LONG),
    "hierarchical": ("aab", Way("hierarchical"), LONG),
    "one rank": ("a", Way("none"), SHORT),
}


def _reduced(way, elements, cuts, transform=None):
    """Return what each rank has in its targets, which are cut so, after a mean over the ranks."""
    communicator = world_communicator()
    rank, size, dtype = communicator.rank, communicator.size, numpy.dtype("f8")
    sources, where = Pieces((0, elements // 2, elements)), Pieces(cuts)
    values = numpy.arange(elements) + 10.0 * rank
    given = [values[: elements // 2], values[elements // 2 :]]
    targets = [numpy.full(stop - start, 100.0) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
    if way is None:
        bound = communicator.small((elements,), dtype, "sum", 1 / size, where if len(cuts) > 2 else None)
    else:
        bound = communicator.reduction(way, sources, where, (dtype,) * 3, "sum", 1 / size)

    def show():
        if bound.slot is not None:
            bound.slot(communicator.control.call + 1)[...] = values

    def move(watch):
        bound.run(watch, given, targets, None if transform is None else transform(targets, where))

    for _ in range(3):  # slots and places are used in turn
        Once(communicator, Call("a way"), move, show)(None)
    assert (values == numpy.arange(elements) + 10.0 * rank).all()
    return numpy.concatenate(targets), bound.owned


def _step(targets, where):
    """Return an optimizer's step on the targets: they become less by the mean."""

    def transform(start, values):
        for piece in where.within(start, start + len(values)):
            offset = where.offsets[piece.member] + piece.start - start
            targets[piece.member][piece.start : piece.stop] -= values[offset : offset + piece.stop - piece.start]

    return transform


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_mean_lies_in_the_targets(name, is_cut):
    hosts, way, elements = WAYS[name]
    cuts = (0, 3, 3, elements) if is_cut else (0, elements)
    found = run_ranks(len(hosts), lambda: _reduced(way, elements, cuts), hosts=list(hosts))
    for result, _ in found:
        numpy.testing.assert_allclose(result, numpy.arange(elements) + 10.0 * (len(hosts) - 1) / 2)
        assert result.tobytes() == found[0][0].tobytes()


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_a_transform_makes_of_the_mean_lies_in_the_targets_of_all_ranks(name, is_cut):
    hosts, way, elements = WAYS[name]
    cuts = (0, 3, 3, elements) if is_cut else (0, elements)
    found = run_ranks(len(hosts), lambda: _reduced(way, elements, cuts, _step), hosts=list(hosts))
    mean = numpy.arange(elements) + 10.0 * (len(hosts) - 1) / 2
    for result, _ in found:
        numpy.testing.assert_allclose(result, 100.0 - 3 * mean)


@pytest.mark.parametrize("name", WAYS)
def test_each_element_is_owned_by_somebody_on_each_node(name):
    hosts, way, elements = WAYS[name]
    found = run_ranks(len(hosts), lambda: _reduced(way, elements, (0, elements)), hosts=list(hosts))
    for node in set(hosts):
        spans = [owned for (_, owned), host in zip(found, hosts, strict=True) if host == node]
        assert {each for owned in spans for start, stop in owned for each in range(start, stop)} == set(range(elements))
