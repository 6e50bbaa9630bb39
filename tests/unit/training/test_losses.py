"""Losses of a global batch: TensorFlow's observed cases of topic ``loss``, and the law that parts sum to the whole."""

from __future__ import annotations

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.input import sharding
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks
from mpidist.training.losses import compute_average_loss, scale_regularization_loss
from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS

CASES = cases("loss")
ALONE = [name for name in CASES if isinstance(CASES[name]["expected"], float)]
RAISING = ["cal_scalar", "cal_neg_gbs", "cal_vector_gbs"]


def on_replicas(size, function, *args):
    """Return what `function`, called with the replica's number, returns on each replica."""

    def rank():
        strategy = MultiWorkerMirroredStrategy()
        return strategy.run(lambda: function(strategy.extended.replica_id, *args))

    return run_ranks(size, rank)


@pytest.mark.parametrize("name", ALONE)
def test_one_replica(name):
    inputs = dict(CASES[name]["input"])
    function = scale_regularization_loss if name.startswith("sc_") else compute_average_loss
    assert function(inputs.pop("loss"), **inputs) == CASES[name]["expected"]


@pytest.mark.parametrize("name", RAISING)
def test_wrong_arguments(name):
    inputs = CASES[name]["input"] or {"loss": [1.0], "global_batch_size": [1, 2]}
    expected = CASES[name]["expected"]
    assert expected["raises"] == "ValueError" or name in DEVIATIONS
    with pytest.raises(ValueError) as raised:
        compute_average_loss(inputs["loss"], global_batch_size=inputs.get("global_batch_size"))
    assert str(raised.value).startswith(expected["message"].split("..")[0])


def test_default_size_is_that_of_all_replicas():
    expected = CASES["cal_replica_default"]["expected"]
    losses = [[1.0, 2.0], [3.0, 4.0]]
    found = on_replicas(2, lambda replica: compute_average_loss(losses[replica]))
    assert found == expected["per_replica"]
    assert sum(found) == expected["reduced_sum"]


def test_regularization():
    loss = CASES["sc_replica"]["input"]["loss"]
    assert on_replicas(2, lambda replica: scale_regularization_loss(loss)) == CASES["sc_replica"]["expected"]


@pytest.mark.parametrize("function", [scale_regularization_loss, compute_average_loss])
def test_across_replicas_is_refused(function):
    message = CASES["sc_cross_ctx"]["expected"]["message"].replace("scale_regularization_loss", function.__name__)

    def rank():
        with MultiWorkerMirroredStrategy().scope(), pytest.raises(RuntimeError) as raised:
            function([1.0, 2.0])
        return str(raised.value)

    assert run_ranks(1, rank) == [message]


def test_no_case_is_forgotten():
    assert {*ALONE, *RAISING, "cal_replica_default", "sc_replica", "sc_cross_ctx"} == set(CASES)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_uneven_and_empty_parts_sum_to_the_mean_of_the_whole(size, rows, weighted):
    losses = numpy.arange(rows, dtype="float64") ** 2
    weights = 1.0 + numpy.arange(rows)

    def part(replica):
        mine = sharding.part(rows, replica, size)
        where = slice(mine.start, mine.stop)
        return compute_average_loss(losses[where], weights[where] if weighted else None)

    whole = losses * weights if weighted else losses
    numpy.testing.assert_allclose(sum(on_replicas(size, part)), whole.sum() / rows, rtol=1e-12)


def test_weights_are_one_a_row_where_the_losses_have_more_dimensions():
    losses = numpy.array([[1.0, 2.0], [3.0, 4.0]])
    assert compute_average_loss(losses, [1.0, 10.0]) == (3 + 70) / 2
    assert compute_average_loss([1.0, 2.0], [[1.0], [10.0]]) == numpy.float32(21 / 2)
    assert compute_average_loss([1.0, 2.0], 3.0) == 4.5
    with pytest.raises(ValueError, match="sample_weight has shape"):
        compute_average_loss([1.0, 2.0], [[1.0, 2.0]])


def test_no_rows_are_no_loss():
    found = compute_average_loss(numpy.zeros((0, 3), "float32"))
    assert (found, found.dtype) == (0, "float32")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_share_has_the_dtype_of_the_losses(dtype):
    losses = numpy.array([1.0, 2.0], dtype)
    shares = [compute_average_loss(losses), scale_regularization_loss(losses)]
    assert [(share, share.dtype) for share in shares] == [(1.5, dtype), (3.0, dtype)]


def test_size_must_be_an_integer():
    with pytest.raises(TypeError, match="2.5"):
        compute_average_loss([1.0], global_batch_size=2.5)


@pytest.mark.parametrize(("dtype", "rows"), [(ml_dtypes.bfloat16, 1000), ("float16", 5000), ("float16", 100_000)])
def test_many_short_floats_are_added_up_in_long_ones(dtype, rows):
    # one by one a bfloat16 stops at 256, and a float16 ends at 65504
    losses = numpy.ones(rows, dtype)
    shares = [
        compute_average_loss(losses),
        compute_average_loss(losses, global_batch_size=2 * rows),
        compute_average_loss((losses * 300).astype(dtype), numpy.full(rows, 1 / 300)),  # NumPy 1 makes float32 of it
        scale_regularization_loss(losses / 8),
    ]
    assert [float(share) for share in shares] == pytest.approx([1, 0.5, 1, rows / 8], rel=2**-8)
    assert {share.dtype for share in shares} == {numpy.dtype(dtype)}


@pytest.mark.parametrize("losses", [[True, True, False, True], numpy.array([1, 1, 0, 1], "int8")])
def test_weights_of_losses_that_are_whole_numbers_are_not_cut_off(losses):
    assert compute_average_loss(numpy.array(losses), [0.25, 0.5, 1, 0.25]) == 0.25


@pytest.mark.parametrize("weights", [(4,), (2,)])
@pytest.mark.parametrize("rows", [1, 3])
def test_weights_of_other_rows_do_not_fit(rows, weights):
    def on_rank():
        with pytest.raises(ValueError, match="does not fit the losses"):
            compute_average_loss(numpy.ones(rows), numpy.ones(weights), global_batch_size=5)

    run_ranks(1, on_rank)
