"""Losses and metrics whose values are not those of rows: refused on all ranks, also by one that has a single row."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

from tests.frameworks.keras_models import distributed, ranks, stock

pytestmark = pytest.mark.mpi(min_size=2)

ops = keras.ops
COLUMNS = 3


def rows_of(count):
    """Return rows, of which the first is 0 and the last `count` - 1, in all columns."""
    return numpy.repeat(numpy.arange(count, dtype="f4")[:, None], COLUMNS, axis=1)


def identity():
    """Outputs are inputs."""
    return keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(COLUMNS, kernel_initializer="identity")])


def single():
    """The output is the first input."""
    model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(1)])
    model.set_weights([numpy.eye(COLUMNS, 1, dtype="f4"), numpy.zeros(1, "f4")])
    return model


def series():
    """Three times of one number each."""
    inputs = keras.Input((COLUMNS,))
    return keras.Model(inputs, keras.layers.Reshape((COLUMNS, 1))(inputs))


def columns(y, outputs):
    return ops.max(ops.abs(ops.subtract(y, outputs)), axis=0)


def numbers(y, outputs):
    return ops.square(ops.subtract(y, outputs))


def means(y, outputs):
    return ops.mean(ops.square(ops.subtract(y, outputs)), axis=-1)


def products(y, outputs):
    return ops.matmul(outputs, ops.transpose(outputs))


def times_first(y, outputs):
    return ops.transpose(ops.mean(ops.square(ops.subtract(y, outputs)), axis=-1))


def pairs(y, outputs):
    """Values of rows by twos."""
    return ops.mean(ops.square(outputs[0::2] - outputs[1::2]), axis=-1)


def outputs_alone(y, outputs):
    return ops.mean(outputs, axis=-1)


def squeezed(y, outputs):
    return ops.square(ops.subtract(y, outputs[:, 0]))


class Own(keras.losses.Loss):
    """Has not what Keras does to labels of one axis."""

    def __init__(self, fn, **settings):
        super().__init__(**settings)
        self.fn = fn

    def call(self, y_true, y_pred):
        return self.fn(y_true, y_pred)


def check(make, loss, metrics, x, y, call="evaluate", **settings):
    model = distributed(make, lambda model: model.compile("sgd", loss, metrics=metrics))
    if call.endswith("on_batch"):
        return getattr(model, call)(x, y, return_dict=True, **settings)
    settings = {"batch_size": len(x), "verbose": 0, **settings}
    return model.fit(x, y, **settings) if call == "fit" else model.evaluate(x, y, return_dict=True, **settings)


#: Rows of a batch: square on each rank; a single row on the last ranks; none on the last one; any number.
COUNTS = [lambda: COLUMNS * ranks(), lambda: 2 * ranks() - 1, lambda: ranks() - 1, lambda: 4 * ranks() + 1]


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("fn", [columns, products])
def test_values_that_are_not_those_of_rows(fn, count, call):
    x = rows_of(count())
    for loss, metrics in ((fn, []), (Own(fn, name=fn.__name__), []), ("mse", [fn])):
        message = f"'{fn.__name__}' returned values of shape .* rows, and would return .*: return a value for each row"
        with pytest.raises(ValueError, match=message):
            check(identity, loss, metrics, x, 0 * x, call)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("metric", [
    lambda: numbers,
    lambda: means,
    lambda: "poisson",
    keras.metrics.Hinge,
    keras.metrics.KLDivergence,
])  # fmt: skip
def test_labels_of_one_axis_that_meet_all_rows_in_a_metric(metric, count):
    x = rows_of(count())
    with pytest.raises(
        ValueError, match=r"metric .*(and would return|Expand labels of shape \(rows,\) to \(rows, 1\))"
    ):
        check(single, "mse", [metric()], x, x[:, 0], "fit")
    check(single, "mse", [metric()], x, x[:, :1])


@pytest.mark.parametrize("count", COUNTS)
def test_labels_of_one_axis_that_meet_all_rows_in_a_loss(count):
    x = rows_of(count())
    with pytest.raises(ValueError, match="loss 'own' returned values .*depends on all rows.*Expand labels"):
        check(single, Own(means, name="own"), [], x, x[:, 0], "fit")
    with pytest.raises(ValueError, match="loss 'own' returned values .*and would return"):
        check(single, Own(numbers, name="own"), [], x, x[:, 0], "fit")
    assert check(single, Own(means, name="own"), [], x, x[:, :1])["loss"] == pytest.approx(0, abs=1e-6)
    assert check(single, means, [], x, x[:, 0])["loss"] == pytest.approx(0, abs=1e-6)  # Keras has expanded them


def test_labels_of_one_axis_that_meet_columns():
    """Keras alone refuses it, unless there are as many rows as columns; and so it was with those of each rank."""
    x = rows_of(COLUMNS * ranks())
    for loss, metrics in ((Own(means, name="means"), []), (Own(outputs_alone), [means])):
        with pytest.raises(
            ValueError, match="'means' returned values of shape .*fails for 24 or 36 rows, as where rows meet columns"
        ):
            check(identity, loss, metrics, x, x[:, 0])


@pytest.mark.parametrize("count", COUNTS)
def test_one_of_several_outputs(count):
    def make():
        inputs = keras.Input((COLUMNS,))
        return keras.Model(inputs, {
            name: keras.layers.Dense(COLUMNS, kernel_initializer="identity", name=name)(inputs) for name in ("a", "b")
        })  # fmt: skip

    x = rows_of(count())
    y = {"a": x + 1, "b": x + 2}
    assert check(make, {"a": numbers, "b": "mse"}, None, x, y)["loss"] == pytest.approx(5, rel=1e-5)
    with pytest.raises(ValueError, match="loss 'columns' returned"):
        check(make, {"a": "mse", "b": columns}, None, x, y)
    with pytest.raises(ValueError, match="metric 'columns' returned"):
        check(make, {"a": "mse", "b": "mse"}, {"a": ["mse"], "b": [columns]}, x, y)


@pytest.mark.parametrize("fn, make, are_metrics", [
    (numbers, identity, True),  # of rows and columns
    (means, identity, True),
    (numbers, series, True),  # of rows, times and columns
    (means, series, True),  # of rows and times
    (times_first, series, False),
])  # fmt: skip
@pytest.mark.parametrize("count", COUNTS)
def test_values_of_rows_with_other_axes(fn, make, are_metrics, count):
    x = rows_of(count())
    y = x[..., None] if make is series else x
    found = check(make, fn, [fn] * are_metrics, x, y + 2)
    assert list(found.values()) == pytest.approx([4] * (1 + are_metrics), rel=1e-5)


@pytest.mark.parametrize("count", COUNTS)
def test_weights(count):
    """Of classes 0 and 1: a row has the weight 1 or 3, and the loss 4."""
    x = rows_of(count())
    weights = numpy.where(x[:, 0] % 2, 3, 1).astype("f4")
    for shape in ((-1,), (-1, 1)):
        found = check(single, means, [], x, x[:, :1] + 2, sample_weight=weights.reshape(shape))
        assert found["loss"] == pytest.approx(4 * weights.mean(), rel=1e-5)
    with pytest.raises(ValueError, match="'columns' returned"):
        check(single, columns, [], x, x[:, :1] + 2, sample_weight=weights)


@pytest.mark.parametrize("axes", [2, 3])
def test_weights_of_rows_that_meet_times(axes):
    """Keras alone refuses them, unless there are as many rows as times; and so it was with those of each rank."""
    x = rows_of(COLUMNS * ranks())
    y, weights = x[..., None] + 2, 1 + x[:, 0]
    fn = means if axes == 2 else numbers
    with pytest.raises(ValueError, match=r"sample_weight has the shape \(3,\).*such as \(rows, 1"):
        check(series, fn, [], x, y, sample_weight=weights)
    found = check(series, fn, [], x, y, sample_weight=weights.reshape(-1, *(1,) * (axes - 1)))
    assert found["loss"] == pytest.approx(4 * weights.mean(), rel=1e-5)


@pytest.mark.parametrize("count", COUNTS)
def test_a_sum_of_values_of_rows_and_times(count):
    x = rows_of(count())
    y, weights = x[..., None] + 2, 1 + x[:, :1]
    loss = keras.losses.MeanSquaredError(reduction="sum")
    assert check(series, loss, [], x, y)["loss"] == pytest.approx(4 * x.size, rel=1e-5)
    found = check(series, loss, [], x, y, sample_weight=weights)
    assert found["loss"] == pytest.approx(4 * COLUMNS * weights.sum(), rel=1e-5)


@pytest.mark.parametrize("count", COUNTS)
def test_a_function_that_needs_no_labels(count):
    x = rows_of(count())
    found = check(single, outputs_alone, [outputs_alone], x, x[:, 0])
    assert list(found.values()) == pytest.approx([(len(x) - 1) / 2] * 2, rel=1e-5)


def test_values_of_pairs_of_rows():
    x = rows_of(4 * ranks())
    assert check(identity, pairs, [pairs], x, x) == pytest.approx({"loss": 1, "pairs": 1})


def test_a_function_of_a_number_of_rows():
    """It cannot be asked for other numbers of rows, and its values are those of rows."""
    x = rows_of(4 * ranks())

    def of_four(y, outputs):
        return ops.reshape(means(y, outputs), (4,))

    assert check(identity, of_four, [of_four], x, x + 2) == pytest.approx({"loss": 4, "of_four": 4}, rel=1e-5)


def test_a_function_that_squeezes_outputs():
    x = rows_of(3 * ranks() + 1)
    assert check(single, "mse", [squeezed], x, x[:, 0] + 2) == pytest.approx({"loss": 4, "squeezed": 4}, rel=1e-5)


def test_each_batch_is_looked_at_once():
    calls = []

    def counted(y, outputs):
        calls.append(tuple(outputs.shape))
        return means(y, outputs)

    x = rows_of(8 * ranks())
    model = distributed(identity, lambda model: model.compile("sgd", counted, metrics=[]))
    model.fit(x, x, batch_size=2 * ranks(), verbose=0)
    first = len(calls)
    model.fit(x, x, batch_size=2 * ranks(), verbose=0, epochs=2)
    assert len(calls) - first == (8 if keras.backend.backend() == "torch" else 0)


def test_a_loss_that_fails_for_other_numbers_of_rows_says_why():
    def few(y, outputs):
        assert len(outputs) <= 16, "at most 16 rows"
        return means(y, outputs)

    x = rows_of(ranks())
    with pytest.raises(ValueError, match="fails for 24 or 36 rows.*at most 16 rows"):
        check(identity, few, [], x, x)
    x = rows_of(2 * ranks())
    assert check(identity, few, [], x, x + 2)["loss"] == pytest.approx(4, rel=1e-5)


def test_losses_and_metrics_keep_nothing():
    """They may be of any class: also of one that has no hash."""

    @dataclasses.dataclass(eq=True)
    class Hashless(keras.losses.Loss):
        power: int = 2

        def __post_init__(self):
            super().__init__(name="hashless")

        def call(self, y_true, y_pred):
            return ops.mean((y_true - y_pred) ** self.power, axis=-1)

    x, loss, metric = rows_of(3 * ranks()), Hashless(), keras.metrics.MeanMetricWrapper(means, name="means")
    metric.update_state(x, x)  # which builds it
    before = [vars(each).copy() for each in (loss, metric)]
    assert list(check(identity, loss, [metric], x, x + 2).values()) == pytest.approx([4, 4], rel=1e-5)
    assert [vars(each).keys() for each in (loss, metric)] == [each.keys() for each in before]


def test_one_process_takes_them_all():
    """What is refused is refused for the parts of a batch, of which there are none here."""
    x = rows_of(4)
    model = stock(identity, lambda model: model.compile("sgd", columns, metrics=[products]))
    assert model.evaluate(x, 0 * x, verbose=0)[0] == pytest.approx(3)
