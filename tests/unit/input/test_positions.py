"""Positions: rows handed out of an epoch, which is gone on with at any batch size and number of ranks, or refused."""

from __future__ import annotations

import warnings

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.errors import InputError
from mpidist.input import Dataset, DistributedDataset
from mpidist.input.options import AutoShardPolicy, Options
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks


def twice(rows):
    return 2 * rows


SOURCES = {
    "arrays": lambda: Dataset.from_arrays(numpy.arange(23)),
    "range": lambda: Dataset.range(100, 117),
    "generator": lambda: Dataset.from_generator(lambda: range(19)),
    "joined": lambda: Dataset.range(9).concatenate(Dataset.from_arrays(numpy.arange(50, 62))),
    "zipped": lambda: Dataset.zip(Dataset.range(14), Dataset.range(30)).map(lambda x, y: 1000 * x + y),
    "no rows": lambda: Dataset.range(0),
}
ROWS = {
    "shuffle": lambda d: d.shuffle(5, seed=3),
    "the same shuffle": lambda d: d.shuffle(4, seed=1, reshuffle_each_iteration=False),
    "repeat": lambda d: d.repeat(2),
    "map": lambda d: d.map(twice, num_parallel_calls=2),
    "filter": lambda d: d.filter(lambda row: row % 3 > 0),
    "window": lambda d: d.skip(2).take(15),
    "shard": lambda d: d.shard(2, 1),
    "cache": lambda d: d.cache(),
    "unbatch": lambda d: d.batch(3).map(twice).unbatch(),
    "prefetch": lambda d: d.prefetch(2),
}
BATCHES = {
    "map": lambda d: d.map(twice),
    "map by rows": lambda d: d.map(twice, by_rows=True),
    "cache": lambda d: d.cache() if d._stage.indexed else d,  # a cached stream is gone on with by batches
    "prefetch": lambda d: d.prefetch(2),
    "repeat": lambda d: d.repeat(2) if d._stage.indexed else d,
}


def parts_of(make, ranks):
    return [DistributedDataset(make(), rank, ranks) for rank in range(ranks)]


def taken(replicas, steps):
    """Return the rows of so many steps in global order, and whether the epoch has ended."""
    iterators, rows = [iter(each) for each in replicas], []
    for _ in range(steps):
        parts = [next(each, None) for each in iterators]
        if parts[0] is None:
            return rows, True
        rows += numpy.concatenate(parts).tolist()
    return rows, False


@settings(max_examples=150)
@given(
    source=st.sampled_from(sorted(SOURCES)),
    rows=st.lists(st.sampled_from(sorted(ROWS)), max_size=3),
    batches=st.lists(st.sampled_from(sorted(BATCHES)), max_size=2),
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    ranks=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    steps=st.lists(st.integers(0, 5), min_size=2, max_size=2),
    epoch=st.integers(0, 2),
)
def test_each_row_of_an_epoch_comes_once_in_its_order_whatever_the_batches_and_ranks(
    source, rows, batches, sizes, ranks, steps, epoch
):
    def made(size):
        dataset = SOURCES[source]()
        for name in rows:
            dataset = ROWS[name](dataset)
        dataset = dataset.batch(size)
        for name in batches:
            dataset = BATCHES[name](dataset)
        return dataset

    whole = DistributedDataset(made(1), 0, 1)  # the epochs, one after the other
    expected = [[row for batch in whole for row in batch.tolist()] for _ in range(epoch + 2)]
    seen, state, ended = [], {"epoch": epoch}, False
    for size, count, most in zip(sizes, ranks, [*steps, 10**6], strict=True):
        replicas = parts_of(lambda size=size: made(size), count)
        for each in replicas:
            each.restore(state)
        found, ended = taken(replicas, most)
        seen += found
        states = [each.state() for each in replicas]
        assert all(each == states[0] for each in states)
        state = states[0]
        if ended:
            break
    assert ended
    assert seen == expected[epoch]
    assert taken(replicas, 10**6)[0] == expected[epoch + 1]  # and the next one is whole


@settings(max_examples=40)
@given(
    size=st.integers(1, 7),
    other=st.integers(1, 7),
    steps=st.integers(0, 9),
    drops=st.tuples(st.booleans(), st.booleans()),
)
def test_what_is_left_out_of_one_repetition_does_not_move_the_next(size, other, steps, drops):
    def made(batch, drop):
        return Dataset.range(10).batch(batch, drop_remainder=drop).repeat(3)

    first = DistributedDataset(made(size, drops[0]), 0, 1)
    (seen, ended) = taken([first], steps)
    rest = DistributedDataset(made(other, drops[1]), 0, 1)
    rest.restore(first.state())
    seen += [] if ended else taken([rest], 10**6)[0]
    for number in range(10):
        assert seen.count(number) <= 3
        if not any(drops):
            assert seen.count(number) == 3
    kept = (
        10 // max(size, other) * min(size, other)
    )  # of a repetition no more than one batch of either size is left out
    assert ended or len(seen) >= 3 * min(kept, 10 - max(size, other))


# -- what differs -----------------------------------------------------------------------------------------------------

ARRAYS = numpy.arange(40)


def plain():
    return Dataset.from_arrays(ARRAYS).shuffle(seed=1)


def of(arrays, **options):
    return lambda: Dataset.from_arrays(arrays).shuffle(**{"seed": 1, **options})


def generated(*buffer):
    return lambda: Dataset.from_generator(lambda: range(40)).shuffle(*buffer)


def changed(method, first, second):
    """Return a data set before and after one of its methods got other arguments, and what is said."""
    before, after = (lambda: getattr(plain(), method)(*first)), (lambda: getattr(plain(), method)(*second))
    shown = [", ".join(map(str, each)) for each in (first, second)]
    return before, after, rf"{method}\({shown[0]}\) when saved, {method}\({shown[1]}\) now"


OTHERS = {
    "seed": (plain, of(ARRAYS, seed=2), r"shuffle\(seed=1\) when saved, shuffle\(seed=2\) now"),
    "rows": (plain, of(numpy.arange(60)), "40 rows of int64.* when saved, 60 rows"),
    "dtype": (plain, of(ARRAYS * 1.0), "int64.* when saved, .*float64.* now"),
    "shape": (plain, of(ARRAYS[:, None]), r"int64\[\] when saved, .*int64\[1\]"),
    "one array more": (plain, of((ARRAYS, ARRAYS)), r"int64\[\], int64\[\] now"),
    "no shuffle": (
        plain,
        lambda: Dataset.from_arrays(ARRAYS),
        r", shuffle\(seed=1\) when saved, 40 rows of int64\[\] now",
    ),
    "the same order": (plain, of(ARRAYS, reshuffle_each_iteration=False), "the same in every epoch"),
    "repeat": changed("repeat", (2,), (3,)),
    "take": changed("take", (30,), (20,)),
    "skip": changed("skip", (3,), (4,)),
    "shard": changed("shard", (2, 0), (2, 1)),
    "filter": (lambda: plain().filter(numpy.isfinite), plain, r"filter\(isfinite\) when saved"),
    "range": (
        lambda: Dataset.range(40),
        lambda: Dataset.range(1, 41),
        "a range from 0 by 1 when saved, .* from 1 by 1",
    ),
    "source": (generated(1), lambda: Dataset.range(40), "generator.* when saved, 40 rows"),
    "buffer": (generated(5), generated(6), r"shuffle\(5, seed=0\) when saved, shuffle\(6, seed=0\) now"),
    "inside zip": (
        lambda: Dataset.zip(plain(), plain()),
        lambda: Dataset.zip(plain(), Dataset.from_arrays(ARRAYS).shuffle(seed=7)),
        r"shuffle\(seed=1\)\) when saved, .*shuffle\(seed=7\)\) now",
    ),
    "second part": (
        lambda: plain().concatenate(Dataset.range(5)),
        lambda: plain().concatenate(Dataset.range(6)),
        "5 rows .* when saved, .* 6 rows .* now",
    ),
    "rows unbatched": (
        lambda: plain().batch(3).map(twice).unbatch(),
        lambda: plain().batch(4).map(twice).unbatch(),
        r"batch\(3\) when saved, batch\(4\) now",
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_a_position_in_another_data_set_is_refused_on_all_ranks(name, ranks):
    before, after, message = OTHERS[name]

    def first(row, *_):
        return row.reshape(()) if hasattr(row, "reshape") else row

    saved = DistributedDataset(before().map(first).batch(4), 0, 1)
    taken([saved], 3)

    def rank():
        distributed = MultiWorkerMirroredStrategy().experimental_distribute_dataset(after().map(first).batch(4))
        with pytest.raises(InputError, match=f"another data set: .*{message}") as raised:
            distributed.restore(saved.state())
        assert raised.value.on_all_ranks
        distributed.restore({**saved.state(), "epoch": 1, "rows": 0})  # every epoch is whole
        return len(list(distributed))

    assert run_ranks(ranks, rank)[0] > 0


BY_BATCH = {
    "shuffled batches": lambda d: d.shuffle(3, seed=8),
    "some batches": lambda d: d.take(8),
    "filtered batches": lambda d: d.filter(lambda batch: batch.sum() >= 0),
    "cached stream": lambda d: d.unbatch().map(twice).filter(lambda row: row >= 0).batch(d.batch_size).cache(),
}


@pytest.mark.parametrize("name", BY_BATCH)
def test_batches_that_are_counted_go_on_with_the_size_that_they_had(name):
    saved = DistributedDataset(BY_BATCH[name](plain().batch(4)), 0, 1)
    seen, _ = taken([saved], 3)
    with pytest.raises(
        InputError, match=r"batch\(4\) when saved, batch\(5\) now.* Only the batch size may differ, where"
    ):
        DistributedDataset(BY_BATCH[name](plain().batch(5)), 0, 1).restore(saved.state())
    again = DistributedDataset(BY_BATCH[name](plain().batch(4)), 0, 1)
    again.restore(saved.state())
    assert seen + taken([again], 99)[0] == taken([DistributedDataset(BY_BATCH[name](plain().batch(4)), 0, 1)], 99)[0]


def test_rows_count_by_number_and_not_by_what_is_in_them():
    saved = DistributedDataset(plain().batch(4), 0, 1)
    taken([saved], 3)
    other = DistributedDataset(Dataset.from_arrays(-ARRAYS).shuffle(seed=1).map(twice).prefetch(1).batch(8), 0, 1)
    other.restore(saved.state())
    order, _ = taken([DistributedDataset(plain().batch(40), 0, 1)], 1)
    assert taken([other], 99)[0] == [-2 * row for row in order[12:]]


def test_files_are_told_by_name_and_rows_wherever_they_are(tmp_path):
    def rows(folder, *lengths, name="{}.npy"):
        (tmp_path / folder).mkdir()
        for number, length in enumerate(lengths):
            numpy.save(tmp_path / folder / name.format(number), numpy.arange(length))
        return DistributedDataset(Dataset.from_npy(tmp_path / folder / "*.npy").batch(2), 0, 1)

    saved = rows("a", 5, 4)
    taken([saved], 2)
    rows("moved", 5, 4).restore(saved.state())
    with pytest.raises(
        InputError, match=r"9 rows .* in 0.npy \(5\), 1.npy \(4\) when saved, 9 .* 0.npy \(4\), 1.npy \(5\)"
    ):
        rows("swapped", 4, 5).restore(saved.state())
    with pytest.raises(InputError, match=r"in 0.npy \(5\), .* when saved, .* in b0.npy \(5\)"):
        rows("renamed", 5, 4, name="b{}.npy").restore(saved.state())
    many = rows("many", *[2] * 12)
    taken([many], 1)
    with pytest.raises(InputError, match=r"\(12 files, checksum 0x.* when saved, .*\(12 files, checksum 0x.* now"):
        rows("one renamed", *[2] * 11, 3).restore(many.state())


def test_a_step_without_the_data_set_that_it_is_a_step_of_is_refused():
    distributed = DistributedDataset(plain().batch(4), 0, 1)
    with pytest.raises(InputError, match=r"step 3 of epoch 0 comes without the data set .* begin with an epoch"):
        distributed.restore({"epoch": 0, "step": 3})
    distributed.restore({"epoch": 2, "step": 0})
    assert (distributed.epoch, len(list(distributed))) == (2, 10)


# -- ranks with rows of their own -------------------------------------------------------------------------------------


def dealt(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def walked(dataset, steps, state=None):
    """Return the rows of so many steps on this rank, and the state then."""
    strategy = MultiWorkerMirroredStrategy()
    made = strategy.distribute_datasets_from_function if callable(dataset) else strategy.experimental_distribute_dataset
    distributed = made(dataset)
    if state is not None:
        distributed.restore(state)
    rows = [row for _, part in zip(range(steps), distributed, strict=False) for row in part.tolist()]
    return rows, distributed.state()


@settings(max_examples=15)
@given(sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)), ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_files_of_each_rank_are_gone_on_with_at_another_batch_size(tmp_path_factory, sizes, ranks):
    folder = tmp_path_factory.mktemp("rows")
    for number, length in enumerate([5, 0, 3, 9, 4]):
        numpy.save(folder / f"{number}.npy", numpy.arange(length) + 100 * number)
    first, second = (
        dealt(Dataset.from_npy(folder / "*.npy").shuffle(seed=2).batch(size), AutoShardPolicy.FILE) for size in sizes
    )
    before = run_ranks(ranks[0], walked, first, 2)
    after = run_ranks(ranks[1], walked, second, 99, before[0][1])
    seen = [row for rows, _ in (*before, *after) for row in rows]
    if before[0][1]["epoch"] == 0:
        assert sorted(seen) == sorted(int(row) for row in Dataset.from_npy(folder / "*.npy"))
    with pytest.raises(InputError, match=r"seed=2\) when saved, shuffle\(seed=3\) now"):
        other = dealt(Dataset.from_npy(folder / "*.npy").shuffle(seed=3).batch(2), AutoShardPolicy.FILE)
        run_ranks(1, walked, other, 1, {**before[0][1], "epoch": 0, "rows": numpy.array([1])})


@pytest.mark.parametrize("policy", [AutoShardPolicy.FILE, AutoShardPolicy.OFF])
def test_a_step_of_each_ranks_own_rows_is_where_walking_comes_to(tmp_path, policy):
    for number in range(3):
        numpy.save(tmp_path / f"{number}.npy", numpy.arange(20) + 100 * number)

    def rank(walk):
        dataset = dealt(Dataset.from_npy(tmp_path / "*.npy").batch(5), policy)
        distributed = MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset)
        if walk:
            iterator = iter(distributed)
            for _ in range(4):
                next(iterator)
            return [part.tolist() for part in iterator]
        distributed.begin(0, 4)
        return [part.tolist() for part in distributed]

    for ranks in (1, 3):
        assert run_ranks(ranks, rank, True) == run_ranks(ranks, rank, False)


def own_rows(size, seed=0, rows=(3, 8, 5)):
    return lambda ctx: Dataset.range(rows[ctx.input_pipeline_id]).shuffle(seed=seed).batch(size)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_data_sets_from_a_function_are_gone_on_with_at_another_batch_size(size):
    before = run_ranks(3, walked, own_rows(2), 2)
    after = run_ranks(3, walked, own_rows(size), 99, before[1][1])
    for number, rows in enumerate((3, 8, 5)):
        whole = next(iter(DistributedDataset(Dataset.range(rows).shuffle(seed=0).batch(rows), 0, 1))).tolist()
        assert before[number][0] + after[number][0] == whole


def refused(dataset, state):
    with pytest.raises(InputError) as raised:
        walked(dataset, 1, state)
    return str(raised.value), raised.value.on_all_ranks


@pytest.mark.parametrize("policy", [AutoShardPolicy.OFF, None])
def test_a_data_set_that_differs_on_one_rank_is_refused_on_all(policy):
    def rank(state, odd):
        number = MultiWorkerMirroredStrategy().extended.replica_id
        made = own_rows(3, seed=odd if number == 1 else 0, rows=(9, 9))
        if policy is None:
            return refused(made, state) if odd else walked(made, 1)
        dataset = dealt(Dataset.range(9).shuffle(seed=odd if number == 1 else 0).batch(6), policy)
        return refused(dataset, state) if odd else walked(dataset, 1)

    _, state = run_ranks(2, rank, None, 0)[0]
    for text, on_all_ranks in run_ranks(2, rank, state, 4):
        assert "on rank 1 shuffle(seed=0) when saved, shuffle(seed=4) now" in text and on_all_ranks


def test_a_position_of_rows_dealt_otherwise_is_refused(tmp_path):
    numpy.save(tmp_path / "0.npy", numpy.arange(9))
    dataset = Dataset.from_npy(tmp_path / "0.npy").batch(2)
    by_policy = [dealt(dataset, policy) for policy in (AutoShardPolicy.FILE, AutoShardPolicy.OFF)]
    kinds = {"global": dataset, "by FILE": by_policy[0], "by OFF": by_policy[1], "from a function": lambda _: dataset}
    states = {kind: run_ranks(2, walked, made, 1)[0][1] for kind, made in kinds.items() if kind != "by FILE"}
    states["by FILE"] = run_ranks(1, walked, by_policy[0], 1)[0][1]
    for name, made in kinds.items():
        for kind, state in states.items():
            if kind != name:
                ((text, _),) = run_ranks(1, refused, made, state)
                assert f"{kind}" in text.partition(" when saved, ")[0] and name in text.partition(" when saved, ")[2]


@pytest.mark.parametrize("make", [lambda n: Dataset.range(n), lambda n: [1.0 * number for number in range(n)]])
def test_elements_without_rows_are_given_as_long_as_all_ranks_have_some(make):
    def rank(lengths):
        strategy = MultiWorkerMirroredStrategy()
        distributed = strategy.distribute_datasets_from_function(lambda ctx: make(lengths[ctx.input_pipeline_id]))
        return [float(each) for _ in range(2) for each in distributed]

    for ranks in (1, 2, 3):
        assert run_ranks(ranks, rank, [3] * ranks) == [[0, 1, 2] * 2] * ranks

    def uneven():
        with pytest.raises(InputError, match=r"ranks \[1\] of 3 have no element for step 2, .* call `batch`") as raised:
            rank([4, 2, 3])
        return raised.value.on_all_ranks

    assert run_ranks(3, uneven) == [True] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_of_somebody_elses_are_alike_on_any_number_of_ranks(ranks):
    def rank():
        made = MultiWorkerMirroredStrategy().distribute_datasets_from_function(
            lambda ctx: [[numpy.ones(2), numpy.ones(2)]]
        )
        return [type(batch) for batch in made]

    assert run_ranks(ranks, rank) == [[tuple]] * ranks


# -- loaders that shuffle ---------------------------------------------------------------------------------------------


class Sampler:
    def __init__(self):
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)


class Loader:
    """Shuffles at each `iter`: by the epoch that its sampler was told, or by a generator without end."""

    def __init__(self, size=4, seed=1, place=None, rows=18):
        self.rows, self.size, self.random, self.told = rows, size, numpy.random.default_rng(seed), Sampler()
        if place == "batch_sampler.sampler":
            self.batch_sampler = Loader(place="sampler")
            self.told = self.batch_sampler.told
        elif place is not None:
            setattr(self, place, self.told if place != "set_epoch" else self.told.set_epoch)
        self.place = place

    def __iter__(self):
        random = self.random if self.place is None else numpy.random.default_rng(self.told.told[-1])
        order = random.permutation(self.rows)
        for first in range(0, self.rows, self.size):
            yield [order[first : first + self.size], {"y": order[first : first + self.size]}]


def rows_of(distributed, steps=99):
    return [row for _, (x, _) in zip(range(steps), distributed, strict=False) for row in x.tolist()]


def loaded(loader):
    return MultiWorkerMirroredStrategy().experimental_distribute_dataset(loader)


@pytest.mark.parametrize("place", ["set_epoch", "sampler", "batch_sampler", "batch_sampler.sampler"])
def test_a_loader_is_told_the_epoch_and_resumes_in_it(place):
    loader = Loader(place=place)
    distributed = loaded(loader)
    epochs = [rows_of(distributed) for _ in range(2)]
    first = rows_of(distributed, 2)
    assert loader.told.told == [0, 1, 2]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == list(range(18))
    other = Loader(place=place, seed=5)
    resumed = loaded(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.restore(distributed.state())
        rest = rows_of(resumed)
    assert other.told.told == [2]
    assert sorted(first + rest) == list(range(18))


def test_a_loader_that_shuffles_anew_warns_once_in_mid_epoch_and_a_sequential_one_does_not():
    def messages(make):
        distributed = loaded(make(1))
        rows_of(distributed, 2)
        resumed = loaded(make(2))
        resumed.restore(distributed.state())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows_of(resumed)
            rows_of(resumed)  # the next epoch is whole
        return [str(each.message) for each in caught]

    (message,) = messages(lambda seed: Loader(seed=seed))
    assert "a Loader gives other batches now than the 2 that were seen of this epoch: rows may come again" in message
    assert "`set_epoch`" in message
    assert messages(lambda seed: Loader(seed=7)) == []
    (message,) = messages(lambda seed: [[numpy.array([{}, {}]), {"y": numpy.array([{}, {}])}]] * 3)
    assert "a list may give other batches now (they cannot be compared)" in message
    assert messages(lambda seed: [list(batch) for batch in Loader(seed=7)]) == []


def loaded_from_function(loader):
    return MultiWorkerMirroredStrategy().distribute_datasets_from_function(lambda _: loader)


@pytest.mark.parametrize("made", [loaded, loaded_from_function])
def test_a_loader_goes_on_with_the_batch_size_that_it_had(made):
    distributed = made(Loader(seed=3))
    rows_of(distributed, 2)
    state = distributed.state()
    for other, message in (
        (
            Loader(seed=3, size=6),
            "first 2 batches had 8 rows when the position was saved, and those of this Loader have 12",
        ),
        (Loader(seed=3, rows=4), "2 batches were seen when .* this Loader has only 1 now"),
    ):
        resumed = made(other)
        resumed.restore(state)
        with pytest.raises(InputError, match=message):
            rows_of(resumed)
    sized = Loader(seed=3)
    sized.batch_size = 4
    with pytest.raises(InputError, match="batches of a Loader when saved, batches of 4 rows of a Loader now"):
        resumed = made(sized)
        resumed.restore(state)
        rows_of(resumed)
