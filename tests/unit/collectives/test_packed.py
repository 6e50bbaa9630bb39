"""What is packed, and what lies apart, before a flat buffer is reduced; the buffer is then twice this rank's values."""

import numpy
import pytest

from mpidist import arrays
from mpidist.collectives.observer import NOBODY
from mpidist.collectives.ways import packed
from mpidist.collectives.ways.packed import bind_packed
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.scratch import Scratch
from mpidist.collectives.ways.selection import Way
from mpidist.testing import run_ranks
from mpidist.testing.device import on_device, pretended_device
from mpidist.world import world_communicator


def _run(sources, targets, dtypes, is_apart=True, prescale=None, scale=None):
    """Return what the replay was given, and the bytes of scratch before it was called."""
    given, scratch = [], Scratch()

    def replay(watch, buffer, source=None):
        given.append((buffer, source))
        numpy.multiply(buffer if source is None else source, 2, out=buffer)

    def pieces(arrays):
        return Pieces([0, *numpy.cumsum([each.size for each in arrays]).tolist()])

    dtypes = [numpy.dtype(each) for each in dtypes]
    like = (numpy.empty(0), pieces(sources), pieces(targets), dtypes, scale, is_apart, scratch, NOBODY, prescale)
    bound = bind_packed(replay, *like)
    nbytes = scratch._memory.nbytes
    bound.run(None, sources, targets)
    return given[0], nbytes


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtypes", ["ddd", "eff", "efe", "idd"])
def test_results_are_twice_the_values_which_stay(is_apart, count, dtypes):
    sources = [numpy.arange(6.0).astype(dtypes[0]) + 10 * each for each in range(count)]
    before, targets = [each.copy() for each in sources], [numpy.zeros(6 * count, dtypes[2])]
    _run(sources, targets, dtypes, is_apart)
    numpy.testing.assert_array_equal(targets[0], 2.0 * numpy.concatenate(before))
    numpy.testing.assert_array_equal(sources, before)


def test_one_array_that_lies_apart_is_not_copied():
    source, target = numpy.arange(6.0), numpy.zeros(6)
    (buffer, given), nbytes = _run([source], [target], "ddd")
    assert numpy.shares_memory(buffer, target) and numpy.shares_memory(given, source) and nbytes == 0


def test_several_arrays_are_packed_apart_from_the_results():
    sources, target = [numpy.ones(2), numpy.ones(3)], numpy.zeros(5)
    (buffer, given), nbytes = _run(sources, [target], "ddd")
    assert numpy.shares_memory(buffer, target) and not numpy.shares_memory(given, target) and nbytes == 5 * 8


def test_in_place_nothing_is_packed_and_no_memory_taken():
    array = numpy.arange(6.0)
    (buffer, given), nbytes = _run([array], [array], "ddd")
    assert numpy.shares_memory(buffer, array) and given is None and nbytes == 0
    assert array.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtypes", ["ddd", "efe", "idd"])
@pytest.mark.parametrize(("prescale", "scale"), [(0.5, None), (None, 4.0), (0.5, 4.0)])
def test_values_are_multiplied_and_so_are_results(prescale, scale, dtypes, count, in_place):
    if in_place and dtypes[0] != dtypes[2]:
        pytest.skip("results are of another dtype")
    sources = [(2 * numpy.arange(6)).astype(dtypes[0]) for _ in range(count)]
    before = numpy.concatenate(sources)
    targets = sources if in_place else [numpy.zeros(6 * count, dtypes[2])]
    _run(sources, targets, dtypes, True, prescale, scale)
    found = numpy.concatenate(targets)
    assert found.dtype == dtypes[2]
    numpy.testing.assert_array_equal(found, before * 2 * (prescale or 1) * (scale or 1))


@pytest.mark.parametrize(("dtype", "is_new", "expected"), [("f4", True, 1), ("f4", False, 0), ("f2", True, 0)])
def test_a_device_multiplies_while_it_unpacks(dtype, is_new, expected, monkeypatch):
    """Results in new arrays are packed as they are reduced, where they are of the dtype of sums."""
    alone = []
    monkeypatch.setattr(packed, "_multiply", lambda values, factor: alone.append(factor))
    parts, own, work = Pieces((0, 3, 6)), numpy.dtype(dtype), numpy.dtype("f4")
    with pretended_device():
        sources = [on_device(numpy.ones(3, dtype)) for _ in range(2)]
        targets, where = ([on_device(numpy.ones(6, dtype))], Pieces((0, 6))) if is_new else (sources, parts)
        like = (sources[0], parts, where, (own, work, own), 0.5, False, Scratch(), NOBODY, 8.0)
        bind_packed(lambda watch, buffer: None, *like).run(None, sources, targets)
        found = arrays.as_host(targets[0])[:3]
    assert alone == [0.5] * expected
    assert found.tolist() == [8.0 if expected else 4.0] * 3


@pytest.mark.parametrize(("dtype", "elements"), [("f4", 0), ("f2", 1000)])
def test_on_a_device_only_16_bit_floats_take_memory_besides_the_results(dtype, elements, monkeypatch):
    made, empty = [], arrays.empty

    def on_rank():
        ranks, array = world_communicator(), on_device(numpy.ones(1000, dtype))
        where, dtypes = Pieces((0, 1000)), (array.dtype, numpy.dtype("f4"), array.dtype)
        ranks.reduction(Way("staged"), where, where, dtypes, "sum", kind=array)

    monkeypatch.setattr(arrays, "empty", lambda shape, *like: made.append(numpy.prod(shape)) or empty(shape, *like))
    with pretended_device(""):
        run_ranks(2, on_rank)
    assert sum(made) == 2 * elements
