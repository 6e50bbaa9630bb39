"""What is made of elements: map, filter, cache, zip, generators; and that any number of ranks sees the same."""

from __future__ import annotations

import array
import itertools
import threading
from collections import Counter

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.errors import CollectiveMismatchError, InputError
from mpidist.input import ArraySpec, Dataset, DistributedDataset, structure
from mpidist.input.dataset import AUTOTUNE
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.testing import run_ranks

ROWS = 23


def as_lists(batches):
    return [batch.tolist() for batch in batches]


def twice(x):
    return 2 * x


#: Data sets of 23 rows and how their elements come about, indexed ones and streams.
CHAINS = {
    "arrays": lambda: Dataset.from_arrays(numpy.arange(ROWS)),
    "shuffled": lambda: Dataset.from_arrays(numpy.arange(ROWS)).shuffle(seed=3),
    "repeated": lambda: Dataset.from_arrays(numpy.arange(ROWS)).shuffle(seed=3).repeat(2),
    "repeated, then shuffled": lambda: Dataset.from_arrays(numpy.arange(ROWS)).repeat(2).shuffle(seed=1),
    "window": lambda: Dataset.range(50).shuffle(seed=5).skip(4).take(30).shard(2, 1),
    "mapped": lambda: Dataset.from_arrays(numpy.arange(ROWS)).shuffle(seed=1).map(twice, num_parallel_calls=3),
    "cached": lambda: Dataset.range(ROWS).map(twice).cache().shuffle(seed=2),
    "joined": lambda: Dataset.range(9).concatenate(Dataset.range(100, 112)).shuffle(seed=9),
    "generated": lambda: Dataset.from_generator(lambda: range(ROWS)).map(twice),
    "generated, shuffled": lambda: Dataset.from_generator(lambda: range(ROWS)).shuffle(7, seed=4),
    "generated, shuffled whole": lambda: Dataset.from_generator(lambda: range(ROWS)).shuffle(seed=4),
    "generated, repeated": lambda: Dataset.from_generator(lambda: range(ROWS)).shuffle(4, seed=4).repeat(2),
    "generated, window": lambda: Dataset.from_generator(lambda: range(90)).skip(3).take(60).shard(3, 1),
    "generated, cached": lambda: Dataset.from_generator(lambda: range(ROWS)).cache().shuffle(5, seed=1),
    "generated, joined": lambda: Dataset.from_generator(lambda: range(9)).concatenate(Dataset.range(5)),
    "filtered": lambda: Dataset.range(40).shuffle(seed=6).filter(lambda x: x % 3 > 0),
    "unbatched": lambda: Dataset.range(ROWS).batch(4).map(twice).unbatch(),
    "prefetched": lambda: Dataset.range(ROWS).shuffle(seed=7).prefetch(2),
}

#: What may come behind `batch`.
BEHIND = {
    "nothing": lambda d: d,
    "map": lambda d: d.map(twice),
    "map by rows": lambda d: d.map(twice, by_rows=True),
    "repeat": lambda d: d.repeat(2),
    "shuffle": lambda d: d.shuffle(3, seed=8),
    "cache": lambda d: d.cache(),
    "filter": lambda d: d.filter(lambda batch: batch.sum() % 2 == 0),
    "window": lambda d: d.skip(1).take(4),
}


@pytest.mark.parametrize("chain", CHAINS)
@settings(max_examples=8)
@given(
    batch=st.integers(1, 9),
    drop=st.booleans(),
    behind=st.sampled_from(sorted(BEHIND)),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    taken=st.integers(0, 9),
)
def test_any_number_of_ranks_sees_the_batches_of_one_and_resumes_where_it_was(chain, batch, drop, behind, ranks, taken):
    def made():
        return BEHIND[behind](CHAINS[chain]().batch(batch, drop_remainder=drop))

    before, after = ranks
    alone, expected, ends = DistributedDataset(made(), 0, 1), [], []
    while len(ends) < 2 or ends[-2] <= taken:
        expected += as_lists(alone)
        if not expected:
            return  # nothing is left of it
        ends.append(len(expected))
        if len(ends) > 20:
            return  # nearly nothing
    first = [DistributedDataset(made(), r, before) for r in range(before)]
    seen = list(itertools.islice(global_batches(first, len(ends)), taken))
    assert seen == expected[:taken]
    resumed = [DistributedDataset(made(), r, after) for r in range(after)]
    for each in resumed:
        each.restore(first[0].state())
    rest = list(global_batches(resumed, 2))
    assert rest == expected[taken : taken + len(rest)]
    assert taken + len(rest) in ends


def global_batches(replicas, epochs):
    """Yield the parts of all replicas joined, for some epochs."""
    for _ in range(epochs):
        for parts in zip(*replicas, strict=True):
            yield numpy.concatenate(parts).tolist()


@pytest.mark.parametrize("chain", CHAINS)
def test_lengths_are_what_iterating_gives(chain):
    dataset = CHAINS[chain]()
    count = len(list(dataset))
    assert dataset.cardinality() in (count, -2)
    if dataset.cardinality() == -2:
        with pytest.raises(TypeError, match="only iterating tells"):
            len(dataset)
    assert dataset.element_spec == ArraySpec((), numpy.dtype("int64"))
    assert dataset.batch(4).element_spec.shape == (None,)
    assert dataset.batch(4, drop_remainder=True).map(twice).element_spec.shape == (4,)


# -- map --------------------------------------------------------------------------------------------------------------


def test_tuples_are_arguments_and_dicts_are_one():
    pairs = Dataset.from_arrays((numpy.arange(4), numpy.arange(4) * 10))
    assert as_lists(pairs.map(lambda x, y: x + y).batch(4)) == [[0, 11, 22, 33]]
    named = pairs.map(lambda x, y: {"sum": x + y, "pair": (x, y)})
    (batch,) = named.map(lambda element: element["sum"] - element["pair"][1]).batch(4)
    assert batch.tolist() == [0, 1, 2, 3]


def test_a_rank_maps_its_own_rows_only_of_arrays_and_of_streams():
    for source in (lambda: Dataset.range(12), lambda: Dataset.from_generator(lambda: range(12))):
        calls = Counter()
        dataset = source().map(lambda x, calls=calls: calls.update([int(x)]) or x).batch(6)
        assert as_lists(DistributedDataset(dataset, 1, 3)) == [[2, 3], [8, 9]]
        assert calls == Counter([2, 3, 8, 9])


def test_threads_map_at_the_same_time_and_in_order():
    together = threading.Barrier(3, timeout=30)

    def wait_for_others(x):
        together.wait()
        return -x

    for source in (Dataset.range(6), Dataset.from_generator(lambda: range(6))):
        dataset = source.map(wait_for_others, num_parallel_calls=3).batch(3)
        assert as_lists(dataset) == [[0, -1, -2], [-3, -4, -5]]
    assert as_lists(Dataset.range(3).map(twice, num_parallel_calls=AUTOTUNE).batch(3)) == [[0, 2, 4]]
    with pytest.raises(ValueError, match="num_parallel_calls must be 1 or more, or AUTOTUNE"):
        Dataset.range(3).map(twice, num_parallel_calls=-3)


def test_a_failing_map_is_named_with_rank_step_row_and_cause():
    def fail_at_7(x):
        if x == 7:
            raise ZeroDivisionError("seven")
        return x

    for dataset, place in (
        (Dataset.from_arrays(numpy.arange(12)).map(fail_at_7), "row 7"),
        (Dataset.from_generator(lambda: range(12)).map(fail_at_7), "element 7"),
        (Dataset.range(1, 12).map(fail_at_7, num_parallel_calls=2).prefetch(3), "element 6"),
    ):
        mine, other = (iter(DistributedDataset(dataset.batch(4), replica, 2)) for replica in (1, 0))
        assert len(next(mine)) == 2
        message = rf"rank 1 of 2: no batch for step 1 of epoch 0: map\(.*fail_at_7\) of {place} failed: Zero.*: seven"
        with pytest.raises(InputError, match=message) as raised:
            next(mine)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        with pytest.raises(StopIteration):
            next(mine)
        assert sum(1 for _ in other) == 3  # these rows are not its own


def test_other_failures_are_named_too():
    def broken():
        yield 1
        raise OSError("no such tape")

    with pytest.raises(InputError, match=r"generator .*broken failed at element 1: OSError: no such tape"):
        list(DistributedDataset(Dataset.from_generator(broken).batch(2), 0, 1))
    with pytest.raises(InputError, match=r"filter\(.*\) of row 2 failed: TypeError"):
        list(Dataset.from_arrays(numpy.arange(3)).filter(lambda x: None + 1 if x == 2 else True))
    uneven = Dataset.from_generator(lambda: [numpy.zeros(2), numpy.zeros(3)]).batch(2)
    with pytest.raises(InputError, match=r"step 0 of epoch 0: ValueError: elements of one batch must have one shape"):
        list(DistributedDataset(uneven, 0, 1))


# -- generators -------------------------------------------------------------------------------------------------------


def test_a_signature_converts_and_is_checked():
    spec = (ArraySpec((2,), numpy.dtype("f4")), ArraySpec((), numpy.dtype("i8")))
    dataset = Dataset.from_generator(lambda n: (([i, i], i) for i in range(n)), spec, args=(3,))
    x, y = next(iter(dataset.batch(3)))
    assert (x.dtype, x.tolist(), y.tolist()) == ("f4", [[0, 0], [1, 1], [2, 2]], [0, 1, 2])
    assert dataset.element_spec == spec
    with pytest.raises(InputError, match=r"element 0 of the generator .* is not as its signature: its shape is \(3,\)"):
        list(Dataset.from_generator(lambda: [([1, 2, 3], 1)], spec))
    with pytest.raises(TypeError, match="needs a function that returns an iterable, got generator"):
        Dataset.from_generator(i for i in range(3))


def test_skipped_elements_of_a_stream_are_not_mapped():
    calls = []
    dataset = Dataset.from_generator(lambda: range(12)).map(lambda x: calls.append(int(x)) or x).batch(3)
    distributed = DistributedDataset(dataset, 0, 1)
    distributed.restore({"epoch": 0, "rows": 6})
    assert as_lists(distributed) == [[6, 7, 8], [9, 10, 11]]
    assert calls == [6, 7, 8, 9, 10, 11]


def test_a_run_resumes_without_reading_what_it_has_seen():
    class Rows(numpy.ndarray):
        taken = []

        def __getitem__(self, key):
            Rows.taken.append(key)
            return super().__getitem__(key)

    distributed = DistributedDataset(Dataset.from_arrays(numpy.arange(10**6).view(Rows)).repeat().batch(8), 0, 2)
    distributed.restore({"epoch": 0, "rows": 8 * 10**9})
    Rows.taken.clear()
    assert len(next(iter(distributed))) == 4
    assert len(Rows.taken) == 1


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_caches_make_every_element_once():
    calls = Counter()
    for source in (Dataset.range(7), Dataset.from_generator(lambda: range(7))):
        calls.clear()
        dataset = source.map(lambda x: calls.update([int(x)]) or x).cache().batch(3)
        assert as_lists(dataset) == as_lists(dataset) == [[0, 1, 2], [3, 4, 5], [6]]
        assert set(calls.values()) == {1}
    kept = Dataset.range(4).batch(2).cache()
    for batch in kept:
        batch += 100  # what is given out is the caller's
    assert as_lists(kept) == [[0, 1], [2, 3]]


def test_data_sets_side_by_side():
    zipped = Dataset.zip((Dataset.range(5), {"b": Dataset.range(10, 14)}))
    assert [(int(a), int(b["b"])) for a, b in zipped] == [(0, 10), (1, 11), (2, 12), (3, 13)]
    assert len(zipped) == 4
    streams = Dataset.zip(Dataset.from_generator(lambda: range(3)), Dataset.range(9)).batch(2)
    assert [(a.tolist(), b.tolist()) for a, b in streams] == [([0, 1], [0, 1]), ([2], [2])]
    assert [(int(n), int(x)) for n, x in Dataset.range(5, 8).enumerate(start=2)] == [(2, 5), (3, 6), (4, 7)]
    batches = Dataset.zip(Dataset.range(6).batch(4), Dataset.range(10, 16).batch(4))
    parts = [DistributedDataset(batches, r, 2) for r in range(2)]
    assert [[tuple(map(list, map(numpy.ndarray.tolist, p))) for p in part] for part in parts] == [
        [([0, 1], [10, 11]), ([4], [14])],
        [([2, 3], [12, 13]), ([5], [15])],
    ]
    with pytest.raises(ValueError, match="at least one data set"):
        Dataset.zip(())


def test_an_endless_data_set_is_shuffled_in_blocks():
    endless = Dataset.range(4).repeat()
    blocks = endless.shuffle(6, seed=1).batch(6)
    first = [next(iter(DistributedDataset(blocks, 0, 1))) for _ in range(1)][0]
    assert sorted(first.tolist()) == [0, 0, 1, 1, 2, 3]
    with pytest.raises(ValueError, match="needs a buffer_size; or call `shuffle` before `repeat`"):
        endless.shuffle()
    assert endless.cardinality() == -1


def test_orders_stay_where_asked():
    kept = Dataset.range(50).shuffle(seed=1, reshuffle_each_iteration=False).batch(50)
    changed = Dataset.range(50).shuffle(seed=1).batch(50)
    assert as_lists(kept) == as_lists(kept)
    assert as_lists(changed) != as_lists(changed)


def test_a_shuffle_is_uniform():
    places = Counter(
        tuple(Dataset.range(3).shuffle(seed=seed).batch(3).reduce(None, lambda _, b: b).tolist()) for seed in range(600)
    )
    assert len(places) == 6
    assert min(places.values()) > 60  # 100 expected


def test_arguments_are_checked():
    dataset = Dataset.range(5)
    with pytest.raises(ValueError, match="buffer_size must be 1 or more, got 0"):
        dataset.shuffle(0)
    with pytest.raises(ValueError, match="num_shards=2 and index=2"):
        dataset.shard(2, 2)
    assert as_lists(dataset.take(-1).batch(9)) == [[0, 1, 2, 3, 4]]
    assert as_lists(dataset.skip(-1).batch(9)) == []
    with pytest.raises(ValueError, match="without elements has no element_spec"):
        _ = dataset.take(0).map(twice).element_spec


def test_reduce():
    assert Dataset.range(5).reduce(0, lambda total, x: total + int(x)) == 10
    assert DistributedDataset(Dataset.range(5).batch(2), 1, 2).reduce(0, lambda n, part: n + len(part)) == 2


def one_buffer(make, change):
    """Return a generator function that gives one object all the time, changed between elements."""

    def generator():
        buffer = make()
        for number in range(6):
            change(buffer, number)
            yield buffer

    return generator


def set_first(buffer, number):
    buffer[0] = number


@pytest.mark.parametrize("behind", [lambda d: d, lambda d: d.prefetch(3), lambda d: d.cache()])
@pytest.mark.parametrize("make", [lambda: numpy.zeros(1), lambda: [0.0], lambda: array.array("d", [0])])
def test_a_generator_may_fill_one_buffer_again_and_again(make, behind):
    dataset = behind(Dataset.from_generator(one_buffer(make, set_first)).map(lambda x: numpy.asarray(x)[0]).batch(3))
    assert as_lists(dataset) == [[0, 1, 2], [3, 4, 5]]


def test_arrays_inside_of_elements_are_copied_too():
    generator = one_buffer(
        lambda: {"x": numpy.zeros(1), "y": [0]}, lambda b, n: (set_first(b["x"], n), set_first(b["y"], n))
    )
    (batch,) = Dataset.from_generator(generator).shuffle(seed=1).batch(6)
    assert sorted(batch["x"][:, 0]) == [0, 1, 2, 3, 4, 5]
    assert batch["x"].tolist() == batch["y"].tolist()


def test_a_generator_that_was_begun_is_not_taken_for_a_new_epoch():
    numbers = iter(range(4))
    dataset = Dataset.from_generator(lambda: numbers)
    assert dataset.element_spec == ArraySpec((), numpy.dtype("int64"))
    with pytest.raises(InputError, match="the same range_iterator again, of which elements were taken before"):
        list(dataset)
    again = Dataset.from_generator(lambda: iter(range(4)))
    assert as_lists(again) == as_lists(again) == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [lambda n: Dataset.range(n), lambda n: Dataset.from_generator(lambda: range(n))])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_batches_of_different_sizes_are_not_put_side_by_side(make, replicas):
    zipped = Dataset.zip({"x": make(10).batch(4), "y": make(9).batch(4)})
    assert [(x["x"].tolist(), x["y"].tolist()) for x in zipped.take(2)] == [([0, 1, 2, 3],) * 2, ([4, 5, 6, 7],) * 2]
    errors = []
    for replica in range(replicas):
        try:
            list(DistributedDataset(zipped, replica, replicas))
        except InputError as error:
            errors.append(str(error))
    assert errors
    assert "batches side by side have" in errors[0]
    rows = Dataset.zip(make(10), make(9)).batch(4)
    assert [len(x) for x, _ in rows] == [len(y) for _, y in rows] == [4, 4, 1]


# -- one dtype --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda: Dataset.from_arrays(numpy.zeros((2, 2), "float32")), "got uint8 and then float32"),
        (lambda: Dataset.from_arrays((numpy.zeros((2, 2), "uint8"),)), "one structure and dtype"),
        (lambda: Dataset.from_arrays({"x": numpy.zeros(2, "uint8")}), "got uint8 and then {'x': 'uint8'}"),
        (lambda: Dataset.range(3).map(lambda x: x / 2).shuffle(), "got uint8 and then float64"),
    ],
)
def test_what_follows_is_of_the_same_dtype(second, message):
    """On two ranks one would have bytes, which wrap, and the other floats."""
    first = Dataset.from_arrays(numpy.array([[100, 200], [10, 20]], "uint8"))
    with pytest.raises(TypeError, match=message):
        first.concatenate(second())


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (numpy.zeros((1, 2)), numpy.ones((1, 3)), [[[0, 0]], [[1, 1, 1]]]),
        (numpy.array(["a"]), numpy.array(["bcd"]), [["a"], ["bcd"]]),
        (numpy.zeros((0, 2), "int8"), numpy.ones((1, 1)), [[[1]]]),
    ],
    ids=["shapes", "text", "nothing before"],
)
def test_what_follows_may_have_other_shapes(first, second, expected):
    joined = Dataset.from_arrays(first).batch(1).concatenate(Dataset.from_arrays(second).batch(1))
    assert as_lists(joined) == expected


NUMBERS = [1, 2, 3, 4.5]


def mixed(numbers, signature=None):
    return Dataset.from_generator(lambda: iter(numbers), signature).batch(4)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda: mixed(NUMBERS),
        lambda: Dataset.range(4).map(lambda place: NUMBERS[place]).filter(bool).batch(4),
        lambda: Dataset.range(4).map(lambda place: NUMBERS[place]).batch(4),
        lambda: Dataset.range(4).map(lambda place: NUMBERS[place], num_parallel_calls=2).cache().batch(3).repeat(2),
    ],
    ids=["generated", "mapped and filtered", "mapped", "mapped, of another batch"],
)
def test_a_rank_does_not_have_integers_where_another_has_floats(make, size):
    """Integers have no power of -1."""

    def fn():
        return [batch.dtype for batch in MirroredStrategy().experimental_distribute_dataset(make())]

    with pytest.raises((InputError, CollectiveMismatchError), match="one dtype|dtypes, one for all"):
        run_ranks(size, fn)


def test_ranks_with_data_sets_of_their_own_have_one_dtype():
    def fn():
        strategy = MirroredStrategy()

        def own(context):
            rows = [[1.5], [], [2], [2]][context.input_pipeline_id]
            return Dataset.from_arrays({"a": numpy.array(rows), "b": numpy.ones(len(rows))}).batch(1)

        return list(strategy.distribute_datasets_from_function(own))

    message = "an array has one dtype in all elements: array a is int64 on rank 2, and float64 on rank 0"
    with pytest.raises(InputError, match=message) as raised:
        run_ranks(4, fn)
    assert set(raised.value.rank_errors) == {0, 1, 2, 3}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_signature_makes_numbers_of_one_dtype(size):
    def fn():
        dataset = mixed(NUMBERS, ArraySpec((), numpy.dtype("float32")))
        (batch,) = MirroredStrategy().experimental_distribute_dataset(dataset)
        return batch.dtype, batch.sum()

    found = run_ranks(size, fn)
    assert {dtype for dtype, _ in found} == {numpy.dtype("float32")} and sum(total for _, total in found) == 10.5


def test_elements_that_are_lists_are_converted_once():
    class Number:
        conversions = 0

        def __array__(self, dtype=None, copy=None):
            Number.conversions += 1
            return numpy.ones(1)

    numpy.asarray([Number()])
    of_one, Number.conversions = Number.conversions, 0
    rows = [[Number(), Number()], [Number(), Number()]]
    assert structure.stack(rows).tolist() == [[[1.0], [1.0]]] * 2
    assert Number.conversions == 4 * of_one


@pytest.mark.parametrize(
    "items",
    [[numpy.zeros(2), numpy.zeros(2, "int8")], [1, 2.5], [True, 1], [1.5, "a"], [[1], [2.5]], [2**63, 1], [1, 2**64]],
)
def test_a_batch_has_one_dtype(items):
    with pytest.raises(TypeError, match="elements of one batch must have one dtype, got .* and .*`map`"):
        list(Dataset.range(2).map(lambda place: items[place]).batch(2))


def test_a_seed_may_be_a_number_of_numpy():
    first, second = (list(map(int, Dataset.range(9).shuffle(seed=seed))) for seed in (3, numpy.int64(3)))
    assert first == second
    with pytest.raises(TypeError, match="integer"):
        Dataset.range(9).shuffle(seed=0.5)
