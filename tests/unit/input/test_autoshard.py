"""TensorFlow's observed cases of topic ``autoshard``, and those of several workers that deal a data set."""

from __future__ import annotations

import itertools
import re

import numpy
import pytest

from mpidist.input import Dataset, DistributedDataset, autoshard, sharding
from mpidist.input.batches import rebatched
from mpidist.input.options import AutoShardPolicy, Options
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks
from tests.oracle.cases import cases, exception
from tests.oracle.deviations import DEVIATIONS

CASES = cases("autoshard")
ELEMENTS = [name for name in CASES if re.match(r"shard_(range\d|text\d|repeat)", name)]
REBATCHED = [name for name in CASES if name.startswith("rebatch_shard_")]
MULTI_WORKER = {name: case for name, case in cases("multi_worker").items() if name.startswith("mwms_dataset_")}


def with_policy(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    return dataset.with_options(options)


def text_files(folder, files, lines_per_file):
    """Return the data set of files whose lines say where they are: ``f0l0``, ``f0l1``, ..."""
    for number in range(files):
        text = "".join(f"f{number}l{line}\n" for line in range(lines_per_file))
        (folder / f"part-{number:03}.txt").write_text(text)
    return Dataset.from_text(folder / "part-*.txt")


def ranged(expression):
    """Return the data set that a case writes as ``range(8).batch(4)``."""
    dataset = Dataset
    for name, arguments in re.findall(r"(\w+)\(([^)]*)\)", expression):
        numbers = [int(each.partition("=")[2] or each) for each in arguments.split(",")]
        dataset = getattr(dataset, name)(*numbers)
    return dataset


def source(case, folder):
    return text_files(folder, case["files"], case["lines_per_file"]) if "files" in case else ranged(case["dataset"])


def as_lists(elements):
    return [element.tolist() for element in elements]


def for_worker(dataset, workers, worker):
    """Return what a worker reads where TensorFlow deals elements: whole files, or every so manyth element."""
    policy = autoshard.policy_of(dataset).name
    if policy == "AUTO":
        policy = "FILE" if autoshard.file_count(dataset._stage) >= workers else "DATA"
    if policy == "FILE":
        return Dataset(autoshard.by_file(dataset._stage, workers, worker))
    return dataset.shard(workers, worker) if policy == "DATA" else dataset


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_worker_reads_what_tensorflow_gives_it(name, tmp_path):
    case, expected = CASES[name]["input"], CASES[name]["expected"]
    dataset, workers = with_policy(source(case, tmp_path), case["policy"]), case["workers"]
    error = exception(expected)
    if name in DEVIATIONS:
        assert [as_lists(for_worker(dataset, workers, w)) for w in range(workers)] == [[0], [1], [], []]
    elif error is not None:
        text = re.search("Found an unshardable source dataset|not enough for the required", expected["message"])
        with pytest.raises(error, match=text[0]):
            for_worker(dataset, workers, 0)
    else:
        assert [as_lists(for_worker(dataset, workers, w)) for w in range(workers)] == expected


def test_a_shuffle_with_a_seed_is_dealt_whole():
    case = CASES["shard_shuffle_seeded"]
    dataset = with_policy(ranged(case["input"]["dataset"]), case["input"]["policy"])
    shards = [as_lists(for_worker(dataset, case["input"]["workers"], w)) for w in range(case["input"]["workers"])]
    assert [len(shard) for shard in shards] == case["expected"]["sizes"]
    assert sorted(itertools.chain(*shards)) == case["expected"]["union_sorted"]


@pytest.mark.parametrize("name", REBATCHED)
def test_batches_of_several_replicas_a_worker(name, tmp_path):
    case = CASES[name]["input"]
    workers, per_worker, batch = case["workers"], case["replicas_per_worker"], case["global_batch"]
    dataset = with_policy(source(case, tmp_path).batch(batch), case["policy"])
    if case["policy"] in ("DATA", "AUTO"):
        parts = [as_lists(DistributedDataset(dataset, r, workers * per_worker)) for r in range(workers * per_worker)]
        # TensorFlow deals the parts of a step to workers in turn
        seen = [list(itertools.chain(*zip(*parts[w::workers], strict=True))) for w in range(workers)]
    else:
        sizes = [sharding.rotated_batch_sizes(batch, w, workers, per_worker) for w in range(workers)]
        seen = [as_lists(rebatched(for_worker(dataset, workers, w), itertools.cycle(sizes[w]))) for w in range(workers)]
    assert seen == CASES[name]["expected"]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *MULTI_WORKER.items(),
        *((name, CASES[name]) for name in REBATCHED if CASES[name]["input"]["replicas_per_worker"] == 1),
    ],
)
def test_the_same_on_ranks(name, case, tmp_path):
    inputs = case["input"]
    dataset = source(inputs, tmp_path)
    dataset = dataset if "global_batch" not in inputs else dataset.batch(inputs["global_batch"])

    def rank():
        strategy = MultiWorkerMirroredStrategy()
        return as_lists(strategy.experimental_distribute_dataset(with_policy(dataset, inputs["policy"])))

    assert run_ranks(len(case["expected"]), rank) == case["expected"]


def test_policies_have_tensorflows_numbers():
    assert {policy.name: policy.value for policy in AutoShardPolicy} == CASES["policy_enum"]["expected"]
    default = Options().experimental_distribute.auto_shard_policy
    assert str(default.value) == CASES["policy_default"]["expected"]


def test_no_case_is_forgotten():
    assert {*ELEMENTS, *REBATCHED, "shard_shuffle_seeded", "policy_enum", "policy_default"} == set(CASES)


# -- beyond the observed cases ----------------------------------------------------------------------------------------


def test_file_with_too_few_files_says_what_to_do(tmp_path):
    dataset = with_policy(text_files(tmp_path, 2, 1).batch(2), "FILE")

    def rank():
        MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset)

    with pytest.raises(ValueError, match=r"only has 2 file\(s\), which is not enough for the required 3 .* use AUTO"):
        run_ranks(3, rank)


@pytest.mark.parametrize("rows", [[2, 2], [1, 3], [1, 1, 2]])
def test_files_side_by_side_go_to_a_rank_together(rows, tmp_path):
    for name, counts in [("x", [2, 2]), ("y", rows)]:
        first = 0
        for number, count in enumerate(counts):
            text = "".join(f"{name}{line}\n" for line in range(first, first + count))
            (tmp_path / f"{name}-{number}.txt").write_text(text)
            first += count
    pairs = Dataset.zip(*(Dataset.from_text(tmp_path / f"{name}-*.txt") for name in "xy"))
    dataset = with_policy(pairs.shuffle(seed=1).batch(2), "FILE")

    def rank():
        distributed = MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset)
        return [(x, y) for xs, ys in distributed for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]

    if rows == [2, 2]:
        found = run_ranks(2, rank)
        assert sorted(itertools.chain(*found)) == [(f"x{each}", f"y{each}") for each in range(4)]
    else:
        with pytest.raises(ValueError, match=r"have other rows in theirs: file [01] has .* use AUTO"):
            run_ranks(2, rank)


@pytest.mark.parametrize("policy", ["FILE", "OFF"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_of_files_has_every_row_once(policy, ranks, tmp_path):
    for number, lines in enumerate([5, 0, 3, 9]):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number}.{line}\n" for line in range(lines)))
    rows = [f"{number}.{line}" for number, lines in enumerate([5, 0, 3, 9]) for line in range(lines)]
    dataset = with_policy(Dataset.from_text(tmp_path / "*.txt").shuffle(seed=1).batch(4), policy)

    def rank():
        distributed = MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset)
        return [as_lists(distributed) for _ in range(2)]

    for epoch in zip(*run_ranks(ranks, rank), strict=True):
        assert len({len(steps) for steps in epoch}) == 1  # all ranks make the same number of steps
        seen = sorted(line for steps in epoch for step in steps for line in step)
        assert seen == sorted(rows * (1 if policy == "FILE" else ranks))


def test_replicas_of_one_machine_are_one_worker():
    def rank():
        return as_lists(
            MirroredStrategy().experimental_distribute_dataset(with_policy(Dataset.range(4).batch(4), "OFF"))
        )

    assert run_ranks(2, rank) == [[[0, 1]], [[2, 3]]]


def test_a_rank_whose_files_end_early_gets_empty_batches(tmp_path):
    (tmp_path / "0.txt").write_text("a\n")
    (tmp_path / "1.txt").write_text("b\nc\nd\ne\nf\n")
    dataset = with_policy(Dataset.from_text([tmp_path / "0.txt", tmp_path / "1.txt"]).batch(4), "FILE")

    def rank():
        return as_lists(MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset))

    assert run_ranks(2, rank) == [[["a"], [], []], [["b", "c"], ["d", "e"], ["f"]]]


def test_unknown_options_are_refused():
    with pytest.raises(AttributeError, match="no option 'autoshard'; known: auto_shard_policy"):
        Options().experimental_distribute.autoshard = AutoShardPolicy.OFF
    with pytest.raises(ValueError, match="7 is not a valid AutoShardPolicy"):
        Options().experimental_distribute.auto_shard_policy = 7
    with pytest.raises(TypeError, match="must be a mpidist.data.Options, got dict"):
        Dataset.range(3).with_options({})


def test_a_filter_over_files_is_told_once_what_it_costs(tmp_path, caplog):
    dataset = text_files(tmp_path, 2, 3).filter(lambda line: line.endswith("1")).batch(2)

    def rank():
        return as_lists(MultiWorkerMirroredStrategy().experimental_distribute_dataset(dataset))

    assert run_ranks(2, rank) == [[["f0l1"]], [["f1l1"]]]
    (line,) = [record.message for record in caplog.records if "AUTO" in record.message]
    assert re.search(r"behind filter\(.*\).* every rank reads all 2 files; AutoShardPolicy.FILE would deal them", line)


def test_numbers_of_rows_are_known_without_reading_them():
    assert numpy.array(as_lists(for_worker(Dataset.range(10), 4, 3))).tolist() == [3, 7]
    assert len(for_worker(Dataset.range(10), 4, 1)) == 3
