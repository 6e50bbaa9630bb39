"""TensorFlow's observed cases of topic ``batch_split``, one replica after the other in one process."""

from __future__ import annotations

import numpy
import pytest

from mpidist.errors import OutOfRangeError
from mpidist.input import ArraySpec, Dataset, DistributedDataset, sharding
from mpidist.input.from_function import InputContext
from mpidist.input.options import InputOptions, InputReplicationMode
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks
from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS

CASES = cases("batch_split")
SPLITS = [name for name in CASES if name.startswith("split_n") and name[7].isdigit()]
#: Cases of one worker with two replicas; here every rank is a worker.
FROM_FUNCTION = [name for name in CASES if name.startswith("from_function")]


def steps_of(dataset: Dataset, num_replicas: int) -> list[list]:
    """Return what every replica gets: ``result[step][replica]``."""
    replicas = [list(DistributedDataset(dataset, r, num_replicas)) for r in range(num_replicas)]
    return [list(step) for step in zip(*replicas, strict=True)]


def as_lists(steps: list[list]) -> list:
    return [[batch.tolist() for batch in step] for step in steps]


@pytest.mark.parametrize("name", SPLITS)
def test_every_replica_gets_the_rows_that_tensorflow_gives_it(name):
    case = CASES[name]["input"]
    rows = numpy.arange(int(case["dataset"][len("range(") : -1]))
    dataset = Dataset.from_arrays(rows).batch(case["global_batch"], drop_remainder=case["drop_remainder"])
    assert as_lists(steps_of(dataset, case["replicas"])) == CASES[name]["expected"]


def test_structure():
    case = CASES["split_nested_structure"]
    rows, replicas = case["input"]["rows"], case["input"]["replicas"]
    arrays = {"x": numpy.arange(rows), "y": numpy.arange(2 * rows).reshape(rows, 2)}
    steps = steps_of(Dataset.from_arrays(arrays).batch(case["input"]["global_batch"]), replicas)
    assert [[{key: part[key].tolist() for key in part} for part in step] for step in steps] == case["expected"]
    assert steps[1][1]["y"].shape == (0, 2)


def test_unbatched_is_a_clear_error_where_tensorflow_fails_inside():
    assert "split_unbatched" in DEVIATIONS
    case = CASES["split_unbatched"]["input"]
    with pytest.raises(ValueError, match="Call the `batch` method on the input Dataset in order to be able to split"):
        DistributedDataset(Dataset.from_arrays(numpy.arange(4)), 0, case["replicas"])


def test_rotated_batch_sizes():
    case = CASES["batch_sizes_G3_W2_R2"]
    g, workers, replicas = (case["input"][key] for key in ("global_batch", "workers", "replicas_per_worker"))
    assert [sharding.rotated_batch_sizes(g, w, workers, replicas) for w in range(workers)] == case["expected"]


def test_exhausted():
    *batches, end = CASES["iterator_exhausted_next"]["expected"]
    dataset = Dataset.from_arrays(numpy.arange(2)).batch(2)
    iterators = [iter(DistributedDataset(dataset, r, 2)) for r in range(2)]
    assert [next(iterator).tolist() for iterator in iterators] == batches[0]
    with pytest.raises(StopIteration):
        next(iterators[0])
    assert end == "StopIteration"


def test_iterating_again_restarts():
    replicas = CASES["dataset_reiterated"]["input"]["replicas"]
    dataset = Dataset.from_arrays(numpy.arange(4)).batch(2)
    distributed = [DistributedDataset(dataset, r, replicas) for r in range(replicas)]
    rounds = [as_lists([list(step) for step in zip(*distributed, strict=True)]) for _ in range(2)]
    assert rounds == CASES["dataset_reiterated"]["expected"]


def test_element_spec():
    rows = Dataset.from_arrays(numpy.zeros((8, 3), "float32"))
    for key, drop in (("no_drop", False), ("drop", True)):
        specs = [DistributedDataset(rows.batch(4, drop_remainder=drop), r, 2).element_spec for r in range(2)]
        assert all(isinstance(spec, ArraySpec) and spec.dtype == "float32" for spec in specs)
        assert [str(spec.shape) for spec in specs] == CASES["element_spec_shapes"]["expected"][key]


def test_a_global_batch_that_cannot_be_cut_for_a_function():
    case = CASES["input_context_not_divisible"]
    with pytest.raises(ValueError) as raised:
        InputContext(2, 0, case["input"]["replicas"]).get_per_replica_batch_size(case["input"]["global_batch"])
    assert str(raised.value) == case["expected"]["message"].strip()


@pytest.mark.parametrize("name", FROM_FUNCTION)
def test_every_rank_is_a_worker_with_a_data_set_of_its_own(name):
    assert name in DEVIATIONS
    case = CASES[name]["input"]
    contexts = []

    def rank():
        def dataset_fn(context):
            contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
            rows = numpy.arange(int(case["dataset"][len("range(") : -1]))
            size = context.get_per_replica_batch_size(case["global_batch"])
            return Dataset.from_arrays(rows).batch(size, drop_remainder=case["drop_remainder"])

        return [part.tolist() for part in MultiWorkerMirroredStrategy().distribute_datasets_from_function(dataset_fn)]

    # TensorFlow deals the batches of one data set in turn, while there is one for each; here a rank has all of its own
    dealt = [batch for step in CASES[name]["expected"]["steps"] for batch in step if batch]
    for seen in run_ranks(case["replicas"], rank):
        assert seen[: len(dealt)] == dealt
        assert sum(seen, []) == list(range(len(sum(seen, []))))
        assert len(seen) - len(dealt) < case["replicas"]
    assert sorted(contexts) == [(2, 0, 2), (2, 1, 2)]


def test_get_next_as_optional():
    case = CASES["iterator_get_next_as_optional"]
    replicas = case["input"]["replicas"]
    dataset = Dataset.from_arrays(numpy.arange(3)).batch(2)
    iterators = [iter(DistributedDataset(dataset, r, replicas)) for r in range(replicas)]
    for has_value, values in case["expected"]:
        optionals = [iterator.get_next_as_optional() for iterator in iterators]
        assert [optional.has_value() for optional in optionals] == [has_value] * replicas
        if has_value:
            assert [optional.get_value().tolist() for optional in optionals] == values
        else:
            with pytest.raises(ValueError, match="has no value"):
                optionals[0].get_value()


def test_get_next_raises_at_the_end():
    iterator = iter(DistributedDataset(Dataset.range(2).batch(2), 0, 1))
    assert iterator.get_next().tolist() == [0, 1]
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="End of sequence"):
            iterator.get_next()


def test_input_options():
    expected = CASES["input_options_defaults"]["expected"]
    assert {name: str(value) for name, value in vars(InputOptions()).items()} == expected
    with pytest.raises(ValueError, match="must be 0 or more, got -1"):
        InputOptions(experimental_per_replica_buffer_size=-1)
    with pytest.raises(ValueError, match="needs experimental_replication_mode=PER_REPLICA"):
        InputOptions(experimental_place_dataset_on_device=True, experimental_fetch_to_device=False)
    InputOptions(False, InputReplicationMode.PER_REPLICA, True)


def test_values_from_a_function():
    case = CASES["distribute_values_from_function"]
    array = case["input"]["array"]

    def rank():
        strategy = MultiWorkerMirroredStrategy()
        return strategy.experimental_distribute_values_from_function(lambda ctx: array[ctx.replica_id_in_sync_group])

    assert run_ranks(case["input"]["replicas"], rank) == case["expected"]


def test_no_case_is_forgotten():
    tested = {*SPLITS, "split_nested_structure", "split_unbatched", "batch_sizes_G3_W2_R2"}
    tested |= {"iterator_exhausted_next", "dataset_reiterated", "element_spec_shapes"}
    tested |= {"input_context_not_divisible", *FROM_FUNCTION, "iterator_get_next_as_optional"}
    tested |= {"input_options_defaults", "distribute_values_from_function"}
    assert tested == set(CASES)
