"""Data sets made by a function on every rank; TensorFlow's observed cases where there are some."""

from __future__ import annotations

import numpy
import pytest

from mpidist import get_strategy
from mpidist.input import Dataset
from mpidist.input.from_function import InputContext
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks
from tests.oracle.cases import cases

CASES = cases("multi_worker")


def batches_of(dataset_fn):
    """Return what this rank's loop sees, as lists."""
    return [batch.tolist() for batch in MultiWorkerMirroredStrategy().distribute_datasets_from_function(dataset_fn)]


def test_the_context_tells_who_reads_what():
    def fn():
        seen = []

        def dataset_fn(ctx):
            size = ctx.get_per_replica_batch_size(4)
            seen.append([ctx.num_input_pipelines, ctx.input_pipeline_id, ctx.num_replicas_in_sync, size])
            rows = numpy.arange(6)[ctx.input_pipeline_id :: ctx.num_input_pipelines]
            return Dataset.from_arrays(rows).batch(size)

        steps = batches_of(dataset_fn)
        return {"ctx": seen, "steps": steps}

    assert run_ranks(2, fn) == CASES["mwms_from_function"]["expected"]


def test_a_rank_that_is_out_early_gets_empty_batches():
    def dataset_fn(ctx):
        return Dataset.from_arrays(numpy.arange([2, 5][ctx.input_pipeline_id])).batch(2)

    assert run_ranks(2, batches_of, dataset_fn) == CASES["mwms_from_function_uneven"]["expected"]


def test_a_rank_without_any_batch_gets_the_shapes_of_its_source():
    def fn():
        strategy = MultiWorkerMirroredStrategy()
        rows = [0, 3][strategy.extended.replica_id]
        dataset = Dataset.from_arrays({"x": numpy.ones((rows, 2)), "y": numpy.ones(rows)}).batch(2)
        batches = strategy.experimental_distribute_datasets_from_function(lambda ctx: dataset)
        return [{key: array.shape for key, array in batch.items()} for batch in batches]

    empty = {"x": (0, 2), "y": (0,)}
    assert run_ranks(2, fn) == [[empty, empty], [{"x": (2, 2), "y": (2,)}, {"x": (1, 2), "y": (1,)}]]


def test_a_rank_without_any_batch_learns_the_shapes_from_another():
    def dataset_fn(ctx):
        return [] if ctx.input_pipeline_id == 1 else [{"x": numpy.ones((2, 3), "f4"), "y": (numpy.ones(2, "i2"),)}]

    def fn():
        return list(MultiWorkerMirroredStrategy().distribute_datasets_from_function(dataset_fn))

    (batch,) = run_ranks(3, fn)[1]
    assert (batch["x"].shape, batch["x"].dtype) == ((0, 3), numpy.dtype("f4"))
    assert (batch["y"][0].shape, batch["y"][0].dtype) == ((0,), numpy.dtype("i2"))


def test_nobody_has_a_batch():
    assert run_ranks(2, batches_of, lambda ctx: []) == [[], []]


def test_one_replica():
    assert list(get_strategy().distribute_datasets_from_function(lambda ctx: [ctx])) == [InputContext(1, 0, 1)]


def test_a_global_batch_that_cannot_be_cut():
    with pytest.raises(ValueError, match="5 is not divisible by `num_replicas_in_sync` 2"):
        InputContext(2, 0, 2).get_per_replica_batch_size(5)
