"""Metrics: Keras' observed values, and the law that N ranks give what one rank gives on all rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import hypothesis.strategies as st
import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings

import mpidist
from mpidist import metrics
from mpidist.errors import CollectiveMismatchError
from mpidist.input.sharding import part
from mpidist.testing import run_ranks

OBSERVED = json.loads((Path(__file__).parents[2] / "oracle" / "keras_metrics.json").read_text())["cases"]


def described(case):
    options = ",".join(f"{key}={value}" for key, value in case["options"].items())
    return f"{case['metric']}({options})"


def made(case):
    return getattr(metrics, case["metric"])(**case["options"])


def batches_of(case):
    """Yield the arguments of `update_state` for each batch of a case."""
    for batch in case["batches"]:
        yield [None if part is None else numpy.array(part, "float32") for part in batch]


@pytest.mark.parametrize("case", OBSERVED, ids=described)
def test_metrics_are_those_that_keras_gives(case):
    metric = made(case)
    for batch in batches_of(case):
        metric.update_state(*batch)
    # Keras computes in float32
    numpy.testing.assert_allclose(metric.result(), case["result"], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", OBSERVED[::3], ids=described)
def test_the_ranks_together_give_what_keras_gives(case, size):
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            metric = made(case)
        for number, batch in enumerate(batches_of(case)):
            if number % size == strategy.extended.replica_id:
                strategy.run(metric.update_state, batch)
        return metric.result()

    for result in run_ranks(size, on_rank):
        numpy.testing.assert_allclose(result, case["result"], rtol=2e-6, atol=1e-7)


def test_every_observed_metric_is_public_and_every_public_one_observed():
    classes = {name for name in dir(metrics) if isinstance(getattr(metrics, name), type)} - {"Metric"}
    assert {case["metric"] for case in OBSERVED} == classes


# -- the law ----------------------------------------------------------------------------------------------------------

MAKERS = {
    "mean": lambda: metrics.get("mae"),
    "accuracy": lambda: metrics.get("accuracy"),
    "precision": lambda: metrics.Precision(thresholds=[0.25, 0.5]),
    "recall": lambda: metrics.Recall(),
    "auc": lambda: metrics.AUC(num_thresholds=9),
}
row_counts = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


@settings(max_examples=25)
@given(row_counts, st.sampled_from(sorted(MAKERS)), st.integers(0, 2**32 - 1))
def test_uneven_and_empty_parts_give_the_same_bits_for_counts_and_rounding_for_sums(counts, name, seed):
    random = numpy.random.default_rng(seed)
    labels, scores = random.integers(0, 2, sum(counts)).astype("float64"), random.integers(0, 9, sum(counts)) / 8
    alone = MAKERS[name]()
    alone.update_state(labels, scores)
    bounds = numpy.cumsum([0, *counts])

    def on_rank():
        strategy = mpidist.MirroredStrategy()
        rank = strategy.extended.replica_id
        with strategy.scope():
            metric = MAKERS[name]()
        part = slice(bounds[rank], bounds[rank + 1])
        strategy.run(metric.update_state, (labels[part], scores[part]))
        return metric.result()

    for result in run_ranks(len(counts), on_rank):
        numpy.testing.assert_allclose(result, alone.result(), rtol=1e-12)


@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_auc_is_the_share_of_pairs_in_the_right_order_where_thresholds_tell_all_scores_apart(rows, seed):
    random = numpy.random.default_rng(seed)
    labels, scores = numpy.arange(rows) % 2, random.integers(0, 11, rows) / 10
    metric = metrics.AUC(thresholds=[(number + 0.5) / 10 for number in range(10)])
    metric.update_state(labels, scores)
    differences = scores[labels == 1][:, None] - scores[labels == 0][None]
    assert metric.result() == pytest.approx(((differences > 0) + (differences == 0) / 2).mean(), abs=1e-12)


# -- reading, resetting, saving ---------------------------------------------------------------------------------------


def test_result_in_a_replica_is_that_of_the_replica():
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            mean = metrics.Mean()

        def in_replica():
            mean.update_state([10.0 * strategy.extended.replica_id])
            return mean.result()

        return strategy.run(in_replica), mean.result()

    assert run_ranks(3, on_rank) == [(0.0, 10.0), (10.0, 10.0), (20.0, 10.0)]


def test_a_saved_state_is_the_sum_and_restores_on_another_number_of_ranks_bit_for_bit():
    def saved():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            mean = metrics.Mean()
        mean.update_state([0.1] * (strategy.extended.replica_id + 1))
        return mean.state(), mean.result()

    state, result = run_ranks(3, saved)[0]
    assert state["count"] == 6

    def restored():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            mean = metrics.Mean()
        mean.restore(state)
        return mean.result()

    assert run_ranks(2, restored) == [result, result]


def test_a_state_of_another_metric_is_refused():
    with pytest.raises(ValueError, match=r"metric 'auc': 'true_positives' was saved with shape \(5,\), expected.*200"):
        metrics.AUC().restore(metrics.AUC(num_thresholds=5).state())
    with pytest.raises(ValueError, match="'total' was saved with nothing"):
        metrics.Mean().restore({})


def test_reset_begins_anew():
    mean = metrics.Mean()
    mean.update_state([4.0])
    mean.reset_state()
    assert mean.result() == 0.0
    mean.update_state([2.0])
    assert mean.result() == 2.0


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: metrics.AUC(num_thresholds=1), "more than 1"),
        (lambda: metrics.AUC(curve="LIFT"), "curve must be one of ROC, PR; got 'LIFT'"),
        (lambda: metrics.AUC(summation_method="trapezoid"), "summation_method must be one of"),
        (lambda: metrics.AUC(thresholds=[2.0]), "from 0 to 1"),
        (lambda: metrics.Precision(thresholds=-1), "from 0 to 1"),
        (lambda: metrics.TopKCategoricalAccuracy(k=0), "k must be 1 or more"),
        (lambda: metrics.get("f1"), "no metric 'f1'; known ones: acc, accuracy, auc"),
        (lambda: metrics.AUC().update_state([1.0], [1.5]), "from_logits=True"),
        (lambda: metrics.AUC().update_state([1.0], [numpy.nan]), "from 0 to 1, got nan; look for where"),
        (
            lambda: metrics.AUC(from_logits=True).update_state([1.0], [numpy.nan]),
            "from 0 to 1, got nan; look for where",
        ),
        (lambda: metrics.Recall().update_state([1.0, 0.0], [1.0]), r"y_true has shape \(2,\), y_pred \(1,\)"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_function_is_a_metric():
    def large(y_true, y_pred):
        return y_pred > 1

    metric = metrics.get(large)
    metric.update_state(numpy.zeros(4), numpy.array([0, 1, 2, 3]))
    assert (metric.name, metric.result()) == ("large", 0.5)


@pytest.mark.parametrize("make", [metrics.Mean, metrics.MeanSquaredError])
@pytest.mark.parametrize("rows", [[1.0, 1.0, 5.0], [1.0, 1.0, 1.0, 5.0]])
@pytest.mark.parametrize("size", [1, 2, 3])  # of 4 rows, the third rank has none
def test_a_number_is_the_weight_of_every_row(make, rows, size):
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        mine = numpy.array([rows[place] for place in part(len(rows), strategy.extended.replica_id, size)])
        with strategy.scope():
            metric = make()
        metric.update_state(*([mine] if make is metrics.Mean else [numpy.zeros_like(mine), mine]), sample_weight=2.0)
        return metric.result()

    values = rows if make is metrics.Mean else [value**2 for value in rows]
    assert run_ranks(size, on_rank) == [pytest.approx(sum(values) / len(rows))] * size


def test_a_number_is_the_weight_of_values_of_more_dimensions():
    metric = metrics.Mean()
    metric.update_state(numpy.array([[1.0, 2.0], [3.0, 6.0]]), sample_weight=0.5)
    assert (metric.result(), float(metric.sums["count"])) == (3.0, 1.0)


@pytest.mark.parametrize(
    "spread",
    [
        lambda y_true, y_pred: numpy.abs(y_true - y_pred),
        lambda y_true, y_pred: numpy.mean(numpy.abs(y_true - y_pred), axis=-1),
    ],
    ids=["values", "their means"],
)
@pytest.mark.parametrize("column", ["labels", "predictions"])
def test_a_function_that_spreads_labels_over_predictions_is_refused(spread, column):
    """Labels of shape (rows, 1) and predictions of shape (rows,) make a number for each pair of a rank's rows."""

    def on_rank():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            metric = metrics.get(spread)
        mine = numpy.arange(6.0)[list(part(6, strategy.extended.replica_id, strategy.num_replicas_in_sync))]
        labels, predictions = (mine[:, None], mine) if column == "labels" else (mine, mine[:, None])
        with pytest.raises(
            ValueError, match="metric '<lambda>' returned another value for a row alone than among .*re"
        ):
            metric.update_state(labels, predictions)

    for size in (1, 2, 3):
        run_ranks(size, on_rank)


@pytest.mark.parametrize("scale", [1e-4, 1e-8, 1e8])
def test_small_values_are_spread_no_more_than_large_ones(scale):
    """The squared error of each label to all predictions is not 0, which it is to its own."""
    labels = scale * numpy.arange(4.0)
    metric = metrics.get(lambda y_true, y_pred: numpy.mean((y_true - y_pred) ** 2, axis=-1))
    with pytest.raises(ValueError, match="returned another value for a row alone than among 4 rows"):
        metric.update_state(labels[:, None], labels)


@pytest.mark.parametrize("missing", [numpy.nan, numpy.inf])
def test_a_value_that_is_not_finite_hides_no_spread(missing):
    labels = numpy.array([1.0, 2.0, missing, 4.0])
    own = metrics.get(lambda y_true, y_pred: numpy.abs(y_true[:, 0]) + y_pred * 0)
    own.update_state(labels[:, None], numpy.ones(4))
    assert not numpy.isfinite(own.result())
    spread = metrics.get(lambda y_true, y_pred: numpy.abs(y_true - y_pred)[:, :2])
    with pytest.raises(ValueError, match="returned another value for a row alone"):
        spread.update_state(labels[:, None], numpy.array([1.0, 2.0, 3.0, 4.0]))


def test_a_function_gets_labels_and_predictions_in_the_shapes_that_they_have():
    metric = metrics.get(lambda y_true, y_pred: numpy.abs(y_true[:, 0] - y_pred))
    metric.update_state(numpy.arange(6.0)[:, None], numpy.arange(6.0) + 2)
    assert metric.result() == 2


def test_a_class_is_no_metric():
    with pytest.raises(TypeError, match="a name or a function, got ABCMeta"):
        metrics.get(metrics.Mean)


# -- classes ----------------------------------------------------------------------------------------------------------

OF_CLASSES = [
    lambda: metrics.Precision(class_id=0),
    lambda: metrics.Recall(class_id=1),
    lambda: metrics.Precision(top_k=1),
    lambda: metrics.Recall(top_k=2),
    metrics.CategoricalAccuracy,
    metrics.SparseCategoricalAccuracy,
    metrics.TopKCategoricalAccuracy,
    metrics.SparseTopKCategoricalAccuracy,
]


@pytest.mark.parametrize("make", OF_CLASSES)
def test_rows_are_not_taken_for_classes(make):
    metric = make()
    with pytest.raises(ValueError, match=rf"'{metric.name}': .*shape \(rows, classes\), got \(4,\)"):
        metric.update_state([1, 0, 1, 1], [0.9, 0.8, 0.2, 0.7])
    assert all(not sums.any() for sums in metric.sums.values())


@pytest.mark.parametrize("kind", [metrics.Precision, metrics.Recall])
@pytest.mark.parametrize("options", [{"class_id": 3}, {"top_k": 4}])
def test_classes_that_are_not_there_are_named(kind, options):
    ((what, value),) = options.items()
    with pytest.raises(ValueError, match=f"{what}={value}, but y_pred has 3 classes"):
        kind(**options).update_state([[1, 0, 0]], [[0.9, 0.6, 0.1]])


@pytest.mark.parametrize("kind", [metrics.Precision, metrics.Recall])
@pytest.mark.parametrize(
    "options", [{"class_id": -1}, {"class_id": [0, 1]}, {"class_id": True}, {"top_k": 0}, {"top_k": 1.5}]
)
def test_what_is_no_class_is_refused(kind, options):
    with pytest.raises(ValueError, match=r"must be a whole number of [01] or more, got"):
        kind(**options)


def test_a_class_and_the_highest_scores_as_keras_counts_them():
    y_true = [[1, 0, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0]]
    y_pred = [[0.9, 0.6, 0.1], [0.8, 0.1, 0.1], [0.2, 0.9, 0.7], [0.4, 0.6, 0.8]]
    # observed in Keras 3.15
    for options, precision, recall in (
        ({"class_id": 0}, 1 / 2, 1 / 2),
        ({"class_id": 1}, 1 / 3, 1 / 2),
        ({"class_id": 2}, 1 / 2, 1.0),
        ({"top_k": 1}, 1 / 2, 2 / 5),
        ({"top_k": 2}, 1 / 2, 4 / 5),
    ):
        for kind, expected in ((metrics.Precision, precision), (metrics.Recall, recall)):
            metric = kind(**options)
            metric.update_state(y_true, y_pred)
            assert metric.result() == pytest.approx(expected), (kind, options)


def test_class_numbers_are_no_one_hot_labels():
    for kind in (metrics.CategoricalAccuracy, metrics.TopKCategoricalAccuracy):
        with pytest.raises(ValueError, match="have the sparse metrics"):
            kind().update_state([1, 0], [[0.9, 0.8], [0.2, 0.7]])


@pytest.mark.parametrize("label", [1.7, -0.5, numpy.nan, numpy.inf])
@pytest.mark.parametrize("name", ["sparse_categorical_accuracy", "sparse_top_k_categorical_accuracy", "accuracy"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_a_label_between_two_classes_is_refused(name, label, shape):
    metric = metrics.get(name)
    scores = numpy.array([[0.1, 0.9, 0.0], [0.7, 0.2, 0.1]])
    metric.update_state(numpy.array([1.0, 0.0]).reshape(shape), scores)
    with pytest.raises(ValueError, match=f"'{name}': labels are class numbers, whole ones; got {label}"):
        metric.update_state(numpy.array([1.0, label]).reshape(shape), scores)
    assert metric.result() == 1.0


def test_a_class_that_does_not_exist_is_never_among_the_highest():
    metric = metrics.SparseTopKCategoricalAccuracy(k=2)
    metric.update_state([1, -1, 2, 0], [[0.1, 0.9]] * 4)
    assert metric.result() == 0.5


@pytest.mark.parametrize("dtype", ["c8", "m8[s]", "M8[s]", "f4,f4"])
@pytest.mark.parametrize("metric", [metrics.Mean, metrics.MeanSquaredError, metrics.AUC])
def test_what_would_lose_a_part_as_a_float_is_refused(metric, dtype):
    values = numpy.zeros(1, dtype)
    with pytest.raises(TypeError, match="real numbers"):
        metric().update_state(*[values] * (1 if metric is metrics.Mean else 2))


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7])
def test_a_prediction_that_is_the_threshold_is_not_above_that_of_a_binary_accuracy(threshold, dtype):
    """As in Keras; 0.3 as a bfloat16 is more than 0.3."""
    predictions = numpy.array([threshold, 0.05, 0.9], dtype)
    metric = metrics.BinaryAccuracy(threshold=threshold)
    metric.update_state(numpy.array([0, 0, 1]), predictions)
    assert metric.result() == 1


@pytest.mark.parametrize(
    ("metric", "y_true", "y_pred"),
    [
        ("mse", (3,), (3, 3)),
        ("mse", (1,), (3,)),
        ("mae", (1, 3), (3, 1)),
        (metrics.Accuracy(), (1, 3), (3, 1)),
        (metrics.BinaryAccuracy(), (1, 3), (3, 1)),
        (metrics.get("accuracy"), (1,), (3,)),
        (metrics.SparseCategoricalAccuracy(), (1,), (3, 2)),
        (metrics.SparseTopKCategoricalAccuracy(), (3, 3), (3, 2)),
    ],
)
def test_labels_are_not_spread_over_the_predictions_of_other_rows(metric, y_true, y_pred):
    metric = metrics.get(metric)
    with pytest.raises(ValueError, match=f"{metric.name}.*{re.escape(str(y_pred))}"):
        metric.update_state(numpy.zeros(y_true), numpy.zeros(y_pred))
    assert metric.result() == 0


# -- numbers that are not as precise, or no numbers -------------------------------------------------------------------


def test_a_prediction_that_is_no_number_is_above_no_threshold():
    labels, scores = [1, 1, 0, 0], [0.9, numpy.nan, numpy.nan, 0.1]
    for metric, expected in [
        (metrics.Precision(), 1),
        (metrics.Recall(), 1 / 2),
        (metrics.Precision([0, 1]), [1 / 2, 0]),
    ]:
        metric.update_state(labels, scores)
        numpy.testing.assert_array_equal(metric.result(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tenth", range(1, 10))
def test_a_prediction_that_is_the_threshold_is_not_above_it(dtype, tenth):
    metric = metrics.Precision(tenth / 10)
    metric.update_state([0, 1], numpy.array([tenth / 10, 0.95], dtype))
    assert metric.result() == 1


@pytest.mark.parametrize(
    ("labels", "predictions"),
    [
        (numpy.array([256, 1]), numpy.array([0, 1], "uint8")),
        (numpy.array([0.9, 1.0]), numpy.array([0, 1])),
        (numpy.array([16777217, 1]), numpy.array([16777216, 1], "float32")),
        (numpy.array([-1, 1]), numpy.array([1, 1], bool)),
    ],
)
def test_a_label_that_the_dtype_of_the_predictions_cannot_hold_is_not_equal(labels, predictions):
    metric = metrics.Accuracy()
    metric.update_state(labels, predictions)
    assert metric.result() == 0.5


def test_metrics_that_are_read_in_another_order_are_not_added_up():
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            found = [metrics.Mean("loss"), metrics.Mean("accuracy")]
        first, second = found if strategy.extended.is_chief else found[::-1]
        return first.result(), second.result()

    with pytest.raises(CollectiveMismatchError, match="'total of metric accuracy'.*'total of metric loss'"):
        run_ranks(2, on_rank)


def test_evaluations_by_other_metrics_are_not_added_up():
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(1))
            trainer = mpidist.Trainer(
                lambda p, x, y: ((1.0, x), numpy.ones(1)),
                variable,
                mpidist.optimizers.SGD(0.1),
                metrics=["mse" if strategy.extended.is_chief else "mae"],
            )
        return trainer.evaluate(numpy.zeros(4), numpy.ones(4), verbose=0)

    with pytest.raises(CollectiveMismatchError, match="'total of metric mae'.*'total of metric mse'"):
        run_ranks(2, on_rank)


def test_several_outputs_are_no_rows():
    """As rows, outputs would count alike in each part of a batch, whatever its rows."""
    outputs = numpy.zeros(3), numpy.ones(3)
    for metric in [metrics.MeanAbsoluteError(), metrics.AUC(), metrics.get(lambda labels, found: labels - found)]:
        with pytest.raises(ValueError, match="got a tuple of 2: of several outputs"):
            metric.update_state(outputs, outputs)
    metric = metrics.MeanAbsoluteError()
    metric.update_state((0.0, 1.0, 2.0), (1.0, 1.0, 0.0))
    assert metric.result() == 1.0


def test_a_function_that_returns_one_number_is_no_metric_of_rows():
    """Means over unequal parts of a batch have no sum: on two ranks the mean of 0, 0 and 3 would be 1.5."""

    def mae(y_true, y_pred):
        return numpy.abs(y_true - y_pred).mean()

    metric = metrics.get(mae)
    with pytest.raises(ValueError, match=r"metric 'mae' returned values of shape \(\) for 3 rows: return a value for"):
        metric.update_state(numpy.zeros(3), numpy.zeros(3))
