"""`LinearRegressor` and `LinearClassifier`: losses, gradients, predictions and metrics against closed forms."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist import estimator
from mpidist.data import Dataset
from mpidist.feature_column import numeric_column
from mpidist.testing import run_ranks
from mpidist.training.estimator.heads import BinaryHead, MultiClassHead, RegressionHead

RANDOM = numpy.random.default_rng(3)
COUNT = 23
A, B = RANDOM.normal(size=(COUNT, 2)), RANDOM.normal(size=COUNT)
COLUMNS = [numeric_column("b", dtype="float64"), numeric_column("a", shape=2, dtype="float64")]
BIAS, WEIGHTS_A, WEIGHTS_B = (f"linear/linear_model/{name}" for name in ("bias_weights", "a/weights", "b/weights"))


def input_fn_of(labels, batch_size=4):
    def input_fn(input_context):
        rows = Dataset.from_arrays(({"a": A, "b": B}, labels))
        return rows.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).batch(batch_size)

    return input_fn


def config_of(name):
    strategy = getattr(mpidist, name)()
    return estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)


def by_hand(slope_of, units, global_batch, rate):
    """Return bias and weights after a pass with SGD, by a function of logits and rows that gives the gradient."""
    x = numpy.concatenate([numpy.ones((COUNT, 1)), A, B[:, None]], axis=1)
    w = numpy.zeros((4, units))
    for first in range(0, COUNT, global_batch):
        rows = slice(first, first + global_batch)
        w = w - rate * x[rows].T @ slope_of(x[rows] @ w, rows)
    return x @ w, {BIAS: w[0], WEIGHTS_A: w[1:3], WEIGHTS_B: w[3:]}


def values(of):
    return {name: of.get_variable_value(name) for name in (BIAS, WEIGHTS_A, WEIGHTS_B)}


def assert_same(found, expected):
    for name, value in expected.items():
        numpy.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("ranks", [1, 3])
def test_regressor(tmp_path, ranks):
    labels = RANDOM.normal(size=(COUNT, 2))

    def main():
        config = config_of("MirroredStrategy")
        found = estimator.LinearRegressor(COLUMNS, tmp_path, 2, optimizer="SGD", config=config)
        found.train(input_fn_of(labels))
        return values(found), found.evaluate(input_fn_of(labels)), list(found.predict(input_fn_of(labels)))

    def slope_of(logits, rows):
        return 2 * (logits - labels[rows]) / logits.size

    logits, expected = by_hand(slope_of, 2, 4 * ranks, 0.2)
    for found, results, predicted in run_ranks(ranks, main):
        assert_same(found, expected)
        mean = ((logits - labels) ** 2).mean()
        wanted = {"average_loss": mean, "loss": mean, "label/mean": labels.mean(), "prediction/mean": logits.mean()}
        assert_same(results, wanted)
        numpy.testing.assert_allclose([each["predictions"] for each in predicted], logits, rtol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("vocabulary", [None, ["no", "yes"]])
def test_classifier_of_two(tmp_path, ranks, vocabulary):
    ids = (A[:, 0] + B > 0).astype(int)
    labels = ids[:, None] if vocabulary is None else numpy.array(vocabulary)[ids]

    def main():
        config = config_of("MultiWorkerMirroredStrategy")
        found = estimator.LinearClassifier(
            COLUMNS, tmp_path, label_vocabulary=vocabulary, optimizer=lambda: mpidist.optimizers.SGD(0.7), config=config
        )
        found.train(input_fn_of(labels))
        return values(found), found.evaluate(input_fn_of(labels)), list(found.predict(input_fn_of(labels)))

    def slope_of(logits, rows):
        return (1 / (1 + numpy.exp(-logits)) - ids[rows, None]) / len(logits)

    logits, expected = by_hand(slope_of, 1, 4 * ranks, 0.7)
    p = 1 / (1 + numpy.exp(-logits[:, 0]))
    mean = -(ids * numpy.log(p) + (1 - ids) * numpy.log(1 - p)).mean()
    guessed = p > 0.5
    right = {
        "accuracy": (guessed == ids).mean(),
        "accuracy_baseline": max(ids.mean(), 1 - ids.mean()),
        "precision": (guessed & (ids == 1)).sum() / guessed.sum(),
        "recall": (guessed & (ids == 1)).sum() / ids.sum(),
        "label/mean": ids.mean(),
        "prediction/mean": p.mean(),
        "average_loss": mean,
        "loss": mean,
        "global_step": -(-COUNT // (4 * ranks)),
    }
    for found, results, predicted in run_ranks(ranks, main):
        assert_same(found, expected)
        assert results.keys() == right.keys() | {"auc", "auc_precision_recall"}
        assert_same(results, right)
        pairs = p[ids == 1][:, None] > p[ids == 0]
        assert results["auc"] == pytest.approx(pairs.mean(), abs=0.02)  # 200 thresholds
        assert results["auc_precision_recall"] > ids.mean()
        numpy.testing.assert_allclose([each["probabilities"] for each in predicted], numpy.stack([1 - p, p], 1))
        assert [each["class_ids"][0] for each in predicted] == guessed.astype(int).tolist()
        words = vocabulary or ["0", "1"]
        assert [each["classes"][0] for each in predicted] == [words[each] for each in guessed.astype(int)]
        assert predicted[0]["all_classes"].tolist() == words


@pytest.mark.parametrize("ranks", [1, 2])
def test_classifier_of_three(tmp_path, ranks):
    ids = (A[:, 0] > 0).astype(int) + (B > 0)

    def main():
        config = config_of("CentralStorageStrategy")
        found = estimator.LinearClassifier(COLUMNS, tmp_path, 3, optimizer="SGD", config=config)
        found.train(input_fn_of(ids))
        return values(found), found.evaluate(input_fn_of(ids)), list(found.predict(input_fn_of(ids)))

    def softmax(logits):
        return numpy.exp(logits) / numpy.exp(logits).sum(axis=1, keepdims=True)

    def slope_of(logits, rows):
        return (softmax(logits) - numpy.eye(3)[ids[rows]]) / len(logits)

    logits, expected = by_hand(slope_of, 3, 4 * ranks, 0.2)
    p = softmax(logits)
    mean = -numpy.log(p[numpy.arange(COUNT), ids]).mean()
    for found, results, predicted in run_ranks(ranks, main):
        assert_same(found, expected)
        assert_same(results, {"accuracy": (p.argmax(1) == ids).mean(), "average_loss": mean, "loss": mean})
        numpy.testing.assert_allclose([each["probabilities"] for each in predicted], p, rtol=1e-12)


@pytest.mark.parametrize(
    "head", [RegressionHead(3), BinaryHead(), MultiClassHead(3)], ids=lambda head: type(head).__name__
)
def test_slopes_are_the_gradients_of_losses(head):
    random = numpy.random.default_rng(1)
    logits = 3 * random.normal(size=(5, head.units))
    labels = random.normal(size=(5, 3)) if isinstance(head, RegressionHead) else random.integers(0, head.n_classes, 5)
    slope = numpy.zeros_like(logits)
    for place in numpy.ndindex(*logits.shape):
        step = numpy.zeros_like(logits)
        step[place] = 1e-6
        slope[place] = (head.losses(logits + step, labels).mean() - head.losses(logits - step, labels).mean()) / 2e-6
    numpy.testing.assert_allclose(head.slope(logits, labels), slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("head", [BinaryHead(), MultiClassHead(3)], ids=lambda head: type(head).__name__)
def test_large_logits_overflow_nowhere(head):
    logits = numpy.array([[1000.0, -1000.0, 0.0][: head.units], [-1000.0, 1000.0, 0.0][: head.units]])
    with numpy.errstate(all="raise", under="ignore"):
        losses = head.losses(logits, numpy.array([0, 1]))
        assert numpy.isfinite(head.slope(logits, numpy.array([0, 1]))).all()
    assert losses.tolist() == ([1000.0, 1000.0] if head.units == 1 else [0.0, 0.0])


def test_weights_are_float32_unless_a_column_is_float64(tmp_path):
    found = estimator.LinearRegressor([numeric_column("b")], tmp_path, optimizer="Adam")
    found.train(input_fn_of(B), steps=1)
    assert found.get_variable_value(WEIGHTS_B).dtype == numpy.float32


def test_a_normalizer_is_applied(tmp_path):
    half = numeric_column("b", dtype="float64", normalizer_fn=lambda values: values / 2)
    assert half.read({"b": B})[:, 0].tolist() == (B / 2).tolist()


def test_a_column_of_integers_cuts_nothing_off_what_its_normalizer_makes(tmp_path):
    """One step from 0, by hand: 0.2 times the mean of 2 x y."""
    quarter = numeric_column("b", dtype="int64", normalizer_fn=lambda values: values / 4)
    found = estimator.LinearRegressor([quarter], tmp_path, optimizer="SGD")
    b, y = numpy.array([1, 2, 3]), numpy.array([1.0, 2.0, 1.0])
    found.train(lambda: Dataset.from_arrays(({"b": b}, y)).batch(3))
    expected = 0.2 * 2 * (b / 4 * y).mean()
    numpy.testing.assert_allclose(found.get_variable_value(WEIGHTS_B), [[expected]], rtol=1e-6)


@pytest.mark.parametrize("optimizer", [mpidist.optimizers.SGD(0.2), "SGD", lambda: mpidist.optimizers.SGD(0.2)])
def test_optimizers_by_name_as_objects_and_as_functions(tmp_path, optimizer):
    config = config_of("MirroredStrategy")
    found = estimator.LinearRegressor(COLUMNS, tmp_path, optimizer=optimizer, config=config)
    for _ in range(2):
        found.train(input_fn_of(B), steps=3)
    assert found.get_variable_value("global_step") == 6

    def slope_of(logits, rows):
        return 2 * (logits - B[rows, None]) / logits.size

    x = numpy.concatenate([numpy.ones((COUNT, 1)), A, B[:, None]], axis=1)
    w = numpy.zeros((4, 1))
    for rows in [slice(0, 4), slice(4, 8), slice(8, 12)] * 2:
        w = w - 0.2 * x[rows].T @ slope_of(x[rows] @ w, rows)
    assert_same(values(found), {BIAS: w[0], WEIGHTS_A: w[1:3], WEIGHTS_B: w[3:]})


def test_an_optimizer_with_steps_on_another_model_is_refused(tmp_path):
    optimizer = mpidist.optimizers.Adam(0.1)
    first, second = [
        estimator.LinearRegressor(COLUMNS, tmp_path / name, optimizer=optimizer) for name in ("first", "second")
    ]
    first.train(input_fn_of(B), steps=2)
    with pytest.raises(ValueError, match="this Adam has made 2 steps on another model, and this one begins"):
        second.train(input_fn_of(B), steps=1)
    first.train(input_fn_of(B), steps=1)
    assert first.get_variable_value("global_step") == 3


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": None}, {"optimizer": "Ftrl"}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_default_is_ftrl_with_the_rate_of_tensorflow(tmp_path, ranks, optimizer):
    """Ftrl from 0, without penalties: each weight steps by its gradient over the root of 0.1 and all squares."""
    columns = [numeric_column(f"c{number}", dtype="float64") for number in range(36)]
    x = RANDOM.normal(size=(COUNT, 36))
    features = {column.name: x[:, number] for number, column in enumerate(columns)}
    ids = (x[:, 0] > 0).astype(int)

    def input_fn(input_context):
        rows = Dataset.from_arrays((features, ids))
        return rows.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).batch(4)

    def main():
        found = estimator.LinearClassifier(columns, tmp_path, config=config_of("MirroredStrategy"), **optimizer)
        found.train(input_fn)
        return [found.get_variable_value(f"linear/linear_model/{column.name}/weights").item() for column in columns]

    w, squares = numpy.zeros(37), numpy.full(37, 0.1)
    x = numpy.concatenate([x, numpy.ones((COUNT, 1))], axis=1)
    for first in range(0, COUNT, 4 * ranks):
        rows = slice(first, first + 4 * ranks)
        gradient = x[rows].T @ (1 / (1 + numpy.exp(-x[rows] @ w)) - ids[rows]) / len(ids[rows])
        squares += gradient**2
        w -= min(0.2, 1 / 6) * gradient / numpy.sqrt(squares)
    for found in run_ranks(ranks, main):
        numpy.testing.assert_allclose(found, w[:-1], rtol=1e-9)


REFUSED = {
    "no column": (lambda: estimator.LinearRegressor([], optimizer="SGD"), ValueError, "must be one or more"),
    "two of one name": (lambda: estimator.LinearRegressor([COLUMNS[0]] * 2, optimizer="SGD"), ValueError, "its own"),
    "a name": (lambda: estimator.LinearRegressor(["a"], optimizer="SGD"), TypeError, "made by numeric_column"),
    "an unknown one": (lambda: estimator.LinearRegressor(COLUMNS, optimizer="sgd"), ValueError, "name: sgd"),
    "a number as one": (lambda: estimator.LinearRegressor(COLUMNS, optimizer=1), TypeError, "not an Optimizer"),
    "no label": (lambda: estimator.LinearRegressor(COLUMNS, None, 0, "SGD"), ValueError, "Invalid label_dimension 0"),
    "one class": (lambda: estimator.LinearClassifier(COLUMNS, None, 1, None, "SGD"), ValueError, "2 or more, got 1"),
    "too few words": (lambda: estimator.LinearClassifier(COLUMNS, None, 3, ["a"], "SGD"), ValueError, "1 words for 3"),
    "no key": (lambda: numeric_column(3), TypeError, "key must be a string"),
    "an empty shape": (lambda: numeric_column("a", shape=0), ValueError, "positive integers"),
    "text": (lambda: numeric_column("a", dtype="U3"), ValueError, "convertible to float"),
    "a default": (lambda: numeric_column("a", default_value=0), ValueError, "default_value is for parsing"),
    "no normalizer": (lambda: numeric_column("a", normalizer_fn=3), TypeError, "normalizer_fn must be a callable"),
}

MISFITS = {
    "no such feature": ({"b": B}, B, "Feature a is not in features dictionary"),
    "another shape": ({"a": B, "b": B}, B, r"rows of shape \(2,\), got an array of shape"),
    "text": ({"a": numpy.full((COUNT, 2), "x"), "b": B}, B, "needs numbers"),
    "labels of another shape": ({"a": A, "b": B}, A, r"labels must have the shape \(4, 1\), got \(4, 2\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", MISFITS)
def test_features_and_labels_that_do_not_fit(tmp_path, name):
    features, labels, message = MISFITS[name]
    found = estimator.LinearRegressor(COLUMNS, tmp_path, optimizer="SGD")
    with pytest.raises(ValueError, match=message):
        found.train(lambda: Dataset.from_arrays((features, labels)).batch(4))


def test_masked_numbers_are_refused():
    hidden = numpy.ma.masked_array([0.0, 1.0], [True, False])
    for read in (
        lambda: COLUMNS[0].read({"b": hidden}),
        lambda: RegressionHead().losses(numpy.zeros((2, 1)), hidden),
        lambda: BinaryHead().class_ids(hidden),
    ):
        with pytest.raises(TypeError, match="a masked array, whose mask would be lost"):
            read()


def test_features_without_labels(tmp_path):
    found = estimator.LinearRegressor(COLUMNS, tmp_path, optimizer="SGD")
    with pytest.raises(ValueError, match="labels are needed, and input_fn gives features only"):
        found.train(lambda: Dataset.from_arrays({"a": A, "b": B}).batch(4))


@pytest.mark.parametrize(
    ("head", "labels", "message"),
    [
        (BinaryHead(), [0.5], "whole numbers from 0 to 1, got"),
        (MultiClassHead(3), [3], "whole numbers from 0 to 2, got"),
        (BinaryHead(["no", "yes"]), ["maybe"], r"\['no', 'yes'\], got"),
        (BinaryHead(), ["no"], "need a label_vocabulary"),
    ],
)
def test_labels_that_are_no_class(head, labels, message):
    with pytest.raises(ValueError, match=message):
        head.class_ids(numpy.array(labels))
