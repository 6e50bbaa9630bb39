"""Ranks with rows of their own, and ranks that read what somebody else makes: in step, and resumed on other ranks."""

from __future__ import annotations

import warnings
from collections import namedtuple

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpidist.errors import CollectiveMismatchError, InputError, RankFailedError
from mpidist.input import Dataset
from mpidist.input.options import AutoShardPolicy, Options
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks

#: Rows of the files that are dealt.
FILES = [5, 0, 3, 9, 4]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for number, rows in enumerate(FILES):
        numpy.save(folder / f"{number}.npy", numpy.arange(rows) + 100 * number)
    return folder / "*.npy"


def dealt(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def walk(dataset, steps, state=None):
    """Return (rows this rank sees in so many steps, or to the end of the epoch if it is None; the state then)."""
    distributed = MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset)
    if state is not None:
        distributed.restore(state)
    seen = []
    for step, part in enumerate(distributed, 1):
        seen += part.tolist()
        if step == steps:
            break
    return seen, distributed.state()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    steps=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    chain=st.sampled_from(["plain", "shuffled", "filtered"]),
)
def test_a_run_by_file_resumes_on_other_ranks_with_what_was_not_seen(files, batch, sizes, steps, chain):
    dataset = Dataset.from_npy(files)
    if chain == "shuffled":
        dataset = dataset.shuffle(seed=2)
    if chain == "filtered":
        dataset = dataset.shuffle(seed=2).filter(lambda row: row % 4 > 0)
    expected = sorted(int(row) for row in dataset)
    dataset = dealt(dataset.batch(batch), AutoShardPolicy.FILE)
    seen, state = [], None
    for size, count in zip(sizes, steps, strict=False):
        results = run_ranks(size, walk, dataset, count, state)
        seen += [row for rows, _ in results for row in rows]
        states = [each for _, each in results]
        assert all(str(each) == str(states[0]) for each in states)  # any rank may save it
        state = states[0]
        if state["epoch"] == 1:
            break
    if state["epoch"] == 0:
        seen += [row for rows, _ in run_ranks(2, walk, dataset, None, state) for row in rows]
    assert sorted(seen) == expected


def test_states_can_be_saved(files):
    dataset = dealt(Dataset.from_npy(files).batch(4), AutoShardPolicy.FILE)
    (_, state), _ = run_ranks(2, walk, dataset, 2)
    types = {"feed": str, "epoch": int, "step": int, "rows": numpy.ndarray, "of": list}
    assert {key: type(value) for key, value in state.items()} == types
    assert (state["epoch"], state["step"], state["rows"].tolist()) == (0, 2, [4, 4])


def test_an_epoch_by_file_begins_anew_on_any_number_of_ranks(files):
    dataset = dealt(Dataset.from_npy(files).shuffle(seed=1).batch(6), AutoShardPolicy.FILE)

    def epochs():
        distributed = MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset)
        return [[row for part in distributed for row in part.tolist()] for _ in range(2)]

    expected = sorted(row + 100 * number for number, rows in enumerate(FILES) for row in range(rows))
    for size in (1, 3):
        first, second = zip(*run_ranks(size, epochs), strict=True)
        assert sorted(sum(first, [])) == sorted(sum(second, [])) == expected
        assert first != second


def test_ranks_with_all_rows_resume_each_where_it_was():
    dataset = dealt(Dataset.range(10).batch(4), AutoShardPolicy.OFF)
    results = run_ranks(2, walk, dataset, 3)
    assert [rows for rows, _ in results] == [[0, 1, 2, 3, 4, 5]] * 2
    assert [rows for rows, _ in run_ranks(2, walk, dataset, None, results[0][1])] == [[6, 7, 8, 9]] * 2
    assert [rows for rows, _ in run_ranks(4, walk, dataset, None, results[0][1])] == [[6, 7, 8, 9]] * 4


# -- what somebody else makes -----------------------------------------------------------------------------------------


class Loader:
    """Batches as a data loader gives them: lists of arrays, in an order of its own in every epoch."""

    def __init__(self, seed, batches=3):
        self._random, self._batches = numpy.random.default_rng(seed), batches

    def __len__(self):
        return self._batches

    def __iter__(self):
        for _ in range(self._batches):
            rows = self._random.permutation(5)
            yield [rows[:, None] * [1.0, 2.0], {"label": rows}]


def test_any_iterable_of_batches_is_cut_into_parts():
    def rank():
        distributed = MultiWorkerMirroredStrategy().experimental_distribute_dataset(Loader(7))
        assert len(distributed) == 3
        return [[(x.tolist(), y["label"].tolist()) for x, y in distributed] for _ in range(2)]

    replicas = run_ranks(3, rank)
    expected = Loader(7)
    for epoch in range(2):
        for step, (x, y) in enumerate(expected):
            parts = [replica[epoch][step] for replica in replicas]
            assert sum((part[0] for part in parts), []) == x.tolist()
            assert sum((part[1] for part in parts), []) == y["label"].tolist()
            assert [len(part[1]) for part in parts] == [2, 2, 1]


@pytest.mark.parametrize("make", [
    lambda seed: Loader(seed),
    lambda seed: Dataset.from_generator(lambda: numpy.random.default_rng(seed).random((8, 2))).batch(4),
    lambda seed: Dataset.range(40).filter(lambda x: x % 5 != seed).batch(4),
    lambda seed: Dataset.range(40).batch(4).filter(lambda x: x[0] > 4 * seed),
    lambda seed: Dataset.zip(Dataset.range(40), Dataset.range(40).filter(lambda x: x > seed)).repeat().batch(4),
])  # fmt: skip
def test_batches_that_differ_between_ranks_are_refused_on_all_of_them(make):
    def rank():
        strategy = MultiWorkerMirroredStrategy()
        list(strategy.experimental_distribute_dataset(make(int(strategy.extended.replica_id == 2))))

    with pytest.raises(CollectiveMismatchError, match="checksum of what was read for step 0: .* on rank 2") as raised:
        run_ranks(3, rank)
    assert set(raised.value.rank_errors) == {0, 1, 2}


@pytest.mark.parametrize("make", [
    lambda: Dataset.from_generator(lambda: range(12)).batch(4),
    lambda: Dataset.range(24).filter(lambda x: x % 2 == 0).batch(4),
    lambda: Dataset.range(24).batch(4).filter(lambda x: x[0] % 8 == 0),
])  # fmt: skip
def test_a_look_at_the_data_on_one_rank_is_no_part_of_what_is_compared(make):
    def rank():
        strategy, dataset, seen = MultiWorkerMirroredStrategy(), make(), 0
        for part in strategy.experimental_distribute_dataset(dataset):
            if strategy.extended.replica_id == 1:
                next(iter(dataset))
            seen += len(part)
        return seen

    assert sum(run_ranks(2, rank)) == 12


class Tensor:
    """An array of another library."""

    def __init__(self, array):
        self.array = array

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def __array__(self, dtype=None, copy=None):
        return self.array


def _pixels(value):
    """Return images that differ in one row of their middles only."""
    images = numpy.zeros((8, 28, 28), "uint8")
    images[:, 10:18, 5:23] = value
    return images


@pytest.mark.parametrize("kind", [numpy.asarray, Tensor, lambda array: array if array.dtype.names else array.tolist()])
@pytest.mark.parametrize("wrap", [lambda batch: batch, lambda batch: [batch, batch], lambda batch: {"x": (batch,)}])
@pytest.mark.parametrize("make", [
    lambda value: numpy.arange(8) == value,
    lambda value: numpy.where(numpy.arange(40) < 30, 0, value),
    lambda value: numpy.array(["a", "b", f"{value}"], dtype=object),
    lambda value: numpy.array([(1, value)], dtype=[("a", "i1"), ("b", "i8")]),
    _pixels,
    lambda value: _pixels(value).T,
])  # fmt: skip
def test_all_that_a_batch_may_hold_is_compared(make, wrap, kind):
    def rank(differ):
        strategy = MultiWorkerMirroredStrategy()
        batch = wrap(kind(make(int(differ and strategy.extended.replica_id == 1))))
        return len(list(strategy.experimental_distribute_dataset([batch])))

    assert run_ranks(2, rank, False) == [1, 1]
    with pytest.raises(CollectiveMismatchError, match="checksum of what was read for step 0"):
        run_ranks(2, rank, True)


def test_streams_of_different_lengths_are_refused_where_the_first_one_ends():
    def rank():
        strategy = MultiWorkerMirroredStrategy()
        count = 4 + 2 * strategy.extended.replica_id
        list(strategy.experimental_distribute_dataset(Dataset.from_generator(lambda: range(count)).batch(2)))

    with pytest.raises(
        CollectiveMismatchError, match="for step 2: 0x.* on rank 1, none: the data set has ended on rank 0"
    ):
        run_ranks(2, rank)


def test_an_iterator_can_be_walked_through_once():
    def rank():
        distributed = MultiWorkerMirroredStrategy().experimental_distribute_dataset(iter([numpy.arange(4)]))
        with pytest.raises(TypeError, match="no element_spec"):
            _ = distributed.element_spec
        return [part.tolist() for _ in range(2) for part in distributed]

    with pytest.raises(InputError, match="list_iterator can be walked through once, and it was: for several epochs"):
        run_ranks(2, rank)


def test_what_is_no_batch_is_refused():
    def rank():
        list(MultiWorkerMirroredStrategy().experimental_distribute_dataset([numpy.float64(3)]))

    with pytest.raises(InputError, match="batch 0 of a list is no batch of rows: .* common first dimension"):
        run_ranks(2, rank)


# -- functions --------------------------------------------------------------------------------------------------------


def own_rows(ctx):
    return Dataset.range([3, 8, 5][ctx.input_pipeline_id]).batch(2)


def test_data_sets_from_a_function_resume_on_as_many_ranks():
    def rank(steps, state):
        distributed = MultiWorkerMirroredStrategy().distribute_datasets_from_function(own_rows)
        if state is not None:
            distributed.restore(state)
        parts = [part.tolist() for _, part in zip(range(steps), distributed, strict=False)]
        return parts, distributed.state()

    results = run_ranks(3, rank, 2, None)
    assert [parts for parts, _ in results] == [[[0, 1], [2]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    rest = run_ranks(3, rank, 9, results[1][1])
    assert [parts for parts, _ in rest] == [[[], []], [[4, 5], [6, 7]], [[4], []]]
    assert rest[0][1] == {"feed": "batches from a function", "epoch": 1, "step": 0, "pipelines": 3}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = run_ranks(2, rank, 1, results[0][1])
    assert [parts for parts, _ in again] == [[[0, 1]], [[0, 1]]]
    assert any("begins again: it was left at step 2 of 3 data sets" in str(each.message) for each in caught)


Row = namedtuple("Row", ["x", "y"])


def test_batches_of_named_tuples_are_so_on_ranks_without_rows_too():
    def rank():
        def own(ctx):
            rows = Row(numpy.arange(2), numpy.ones((2, 3)))
            return Dataset.from_arrays(rows).take(2 * ctx.input_pipeline_id).batch(2)

        return next(iter(MultiWorkerMirroredStrategy().distribute_datasets_from_function(own)))

    without, found = run_ranks(2, rank)
    assert type(without) is type(found) is Row
    assert without.x.shape == (0,) and without.y.shape == (0, 3) and found.y.shape == (2, 3)


def test_a_rank_that_fails_in_its_input_is_named_to_the_others():
    def rank():
        strategy = MultiWorkerMirroredStrategy()

        def fail(row):
            if row == 6:
                raise ValueError("no such picture")
            return row

        for part in strategy.experimental_distribute_dataset(Dataset.from_arrays(numpy.arange(12)).map(fail).batch(4)):
            strategy.reduce("SUM", part.astype("f8"), axis=0)

    with pytest.raises(InputError, match="rank 1 of 2: no batch for step 1 of epoch 0: .* row 6 failed") as raised:
        run_ranks(2, rank)
    assert isinstance(raised.value.rank_errors[0], (RankFailedError, InputError))


def test_taking_an_element_inside_run_is_refused():
    def rank():
        strategy = MultiWorkerMirroredStrategy()
        iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(4).batch(2)))
        with pytest.raises(ValueError, match="should be called from outside of replica_fn"):
            strategy.run(lambda: next(iterator))
        return next(iterator).tolist()

    assert run_ranks(2, rank) == [[0], [1]]


def test_rows_of_arrays_as_tensorflow_calls_it():
    strategy = MultiWorkerMirroredStrategy()
    for make in (strategy.make_experimental_numpy_dataset, strategy.experimental_make_numpy_dataset):
        assert [(int(x), y.tolist()) for x, y in make((numpy.arange(2), numpy.ones((2, 1))))] == [(0, [1]), (1, [1])]
