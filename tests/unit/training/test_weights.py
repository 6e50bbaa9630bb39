"""How the gradients of uneven batches are weighted: in no dtype does it show on how many ranks a training ran."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.collectives.reductions import update
from mpidist.testing import run_ranks
from mpidist.training.callbacks import Callback, ModelCheckpoint

SIZES = [1, 2, 3, 5]


def trained(dtype, gradient_of, x, optimizer, **options):
    """Return (a variable of 4 numbers that began at 0, the optimizer) after a training; the loss is 0."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = mpidist.Variable(numpy.zeros(4, dtype), name="v")
    made = optimizer()
    trainer = mpidist.Trainer(lambda v, x: (0.0, numpy.full(4, gradient_of(x), dtype)), variable, made)
    trainer.fit(x, shuffle=False, verbose=0, **options)
    return variable.numpy().astype("float64"), made


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gradient", [6e-8, 1e-5, 1e-3, 200.0, 60000.0])
@pytest.mark.parametrize("rows", [4, 4097, 4099])
def test_float16_neither_overflows_nor_vanishes_in_uneven_batches(size, gradient, rows):
    def on_rank():
        optimizer = lambda: mpidist.optimizers.SGD(2.0**-4)  # noqa: E731 - small, so that the parameters are finite
        return trained("float16", lambda x: gradient, numpy.zeros((rows, 1)), optimizer, batch_size=1024)[0]

    steps = -(-rows // 1024)
    # each step rounds the parameters once, and the weights of the ranks round the gradient once each, in float32
    exact = -steps * float(numpy.float16(gradient)) * 2.0**-4
    for found in run_ranks(size, on_rank):
        numpy.testing.assert_allclose(found, exact, rtol=steps * 2.0**-11, atol=steps * 2.0**-25)


@pytest.mark.parametrize("size", SIZES)
def test_only_the_last_row_has_a_gradient(size):
    x = numpy.zeros(4097, "float16")
    x[-1] = 1

    def on_rank(gradient):
        optimizer = lambda: mpidist.optimizers.SGD(1.0)  # noqa: E731
        return trained("float16", lambda x: gradient * x[0], x, optimizer, batch_size=1024)[0]

    for gradient in numpy.array([1e-3, 3e-5, 1e-5, 6e-8], "float16"):
        for found in run_ranks(size, on_rank, gradient):
            assert (found == -float(gradient)).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("least_bytes", [1, update.LEAST_BYTES])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(("dtype", "gradient"), [("float16", 65504.0), ("float32", 3e38)])
@pytest.mark.parametrize("rows", [12, 13])
def test_the_largest_gradients_are_no_overflow(size, least_bytes, accumulated, dtype, gradient, rows, monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", least_bytes)

    def make():
        inner = mpidist.optimizers.SGD(1 / gradient, gradient_accumulation_steps=accumulated)
        return mpidist.optimizers.LossScaleOptimizer(inner, 1.0, 1000)

    def on_rank():
        if dtype == "float32" and accumulated == 2:
            gradient_of = lambda x: gradient / 2  # noqa: E731 - one rank adds up two of them
        else:
            gradient_of = lambda x: gradient  # noqa: E731
        value, optimizer = trained(dtype, gradient_of, numpy.zeros(rows), make, batch_size=6, epochs=2)
        return value, optimizer.iterations, optimizer.skipped_steps

    steps = 2 * -(-rows // 6) // accumulated
    share = 0.5 if dtype == "float32" and accumulated == 2 else 1.0
    for value, iterations, skipped in run_ranks(size, on_rank):
        assert (iterations, skipped) == (steps, 0)
        numpy.testing.assert_allclose(value, -steps * share, rtol=steps * 2.0**-10)


@pytest.mark.parametrize("size", SIZES)
def test_bfloat16_is_weighted_in_float32(size):
    bfloat16 = numpy.dtype(pytest.importorskip("ml_dtypes").bfloat16)

    def on_rank():
        optimizer = lambda: mpidist.optimizers.SGD(1.0)  # noqa: E731
        return trained(bfloat16, lambda x: x.mean(), numpy.full(7, 0.1), optimizer, batch_size=7)[0]

    for found in run_ranks(size, on_rank):
        assert (found == -float(numpy.array(0.1, bfloat16))).all()


def test_ranks_with_data_of_their_own_are_weighted_by_their_rows():
    parts = [[1.0, 1.0, 1.0, 9.0], [3.0], []]  # 15 / 5 in one step

    def on_rank():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable = mpidist.Variable(0.0, dtype="float64")
        trainer = mpidist.Trainer(lambda v, x: (0.0, x.mean()), variable, mpidist.optimizers.SGD(1.0))
        make = lambda context: [numpy.array(parts[context.input_pipeline_id])]  # noqa: E731
        trainer.fit(strategy.distribute_datasets_from_function(make), verbose=0)
        return float(variable.value)

    numpy.testing.assert_allclose(run_ranks(3, on_rank), [-3.0] * 3, rtol=1e-15)


# -- no message more --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accumulated", "least_bytes", "calls"), [(1, 1 << 40, 1), (1, 1, 2), (2, 1 << 40, 1.5)])
def test_uneven_steps_and_the_first_are_one_collective_more_only_where_counts_go_ahead(
    accumulated, least_bytes, calls, monkeypatch
):
    monkeypatch.setattr(update, "LEAST_BYTES", least_bytes)

    def on_rank(rows):
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(4), name="v")
        optimizer = mpidist.optimizers.SGD(1.0, gradient_accumulation_steps=accumulated)
        trainer = mpidist.Trainer(lambda v, x: (0.0, numpy.ones(4)), variable, optimizer)
        channel = strategy.extended.communicator.control
        trainer.fit(numpy.zeros(4), batch_size=4, verbose=0, epochs=accumulated)  # plans, and what goes with them
        data = strategy.experimental_distribute_dataset(mpidist.data.Dataset.from_arrays(numpy.zeros(rows)).batch(7))
        before = channel.call
        trainer.fit(data, verbose=0)
        return channel.call - before

    few, many = (run_ranks(3, on_rank, rows)[0] for rows in (14, 14 + 4 * 7))
    assert many - few == 4 * calls


# -- saved in the middle of an update ---------------------------------------------------------------------------------


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.trainer.steps_made == self.step:
            self.trainer.stop_now()


def accumulating(folder, stop, accumulated=3, rows=11):
    """Train on rows 0, 1, 2, ... in batches of 4, the mean of which is the gradient; return (value, optimizer)."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = mpidist.Variable(0.0, name="v", dtype="float64")
    optimizer = mpidist.optimizers.SGD(1.0, gradient_accumulation_steps=accumulated)
    trainer = mpidist.Trainer(lambda v, x: (0.0, x.mean()), variable, optimizer)
    callbacks = [ModelCheckpoint(folder, save_freq=1, resume=True), StopAt(stop)]
    trainer.fit(numpy.arange(float(rows)), batch_size=4, shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
    return float(variable.value), optimizer


@pytest.mark.parametrize("stop", [1, 2, 4, 5])
@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 2), (1, 2), (1, 4), (4, 1), (3, 5), (5, 2)])
def test_an_update_goes_on_at_any_number_of_ranks(first, second, stop, tmp_path):
    run_ranks(first, accumulating, tmp_path, stop)
    found = [value for value, _ in run_ranks(second, accumulating, tmp_path, None)]
    # means of rows 0..3, 4..7 and 8..10, in each of two epochs
    numpy.testing.assert_allclose(found, [-2 * (1.5 + 5.5 + 9) / 3] * second, rtol=1e-14)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_saved_does_not_depend_on_the_number_of_ranks(size, tmp_path):
    def on_rank():
        _, optimizer = accumulating(tmp_path, 5)
        return float(optimizer.state()["accumulated/0"])

    numpy.testing.assert_allclose(run_ranks(size, on_rank), [1.5 + 5.5] * size, rtol=1e-14)


def state_after(micro_steps):
    optimizer, variable = mpidist.optimizers.SGD(1.0, gradient_accumulation_steps=3), mpidist.Variable(0.0)
    for _ in range(micro_steps):
        optimizer.apply_gradients([(1.0, variable)])
    return dict(optimizer.state())


def test_sums_of_older_versions_are_refused():
    state = state_after(2)
    del state["accumulated_version"]
    other = mpidist.optimizers.SGD(0.5, gradient_accumulation_steps=3)
    with pytest.raises(
        ValueError, match=r"after micro-batch 2 of an update, by another version.* version 1, expected 2"
    ):
        other.restore({**state, "iterations": 7})
    assert (other.iterations, other.learning_rate, other.micro_step) == (0, 0.5, 0)
    other.restore({key: value for key, value in state_after(3).items() if "version" not in key})  # between updates
    assert other.iterations == 1


@pytest.mark.parametrize("count", [1, 2])
def test_an_update_of_fewer_micro_batches_than_were_saved_is_refused(count):
    other = mpidist.optimizers.SGD(0.5, gradient_accumulation_steps=count)
    with pytest.raises(ValueError, match=f"saved after 2 of . micro-batches, .* gradient_accumulation_steps={count};"):
        other.restore(state_after(2))
    assert other.micro_step == 0


def test_positions_of_older_versions_are_taken():
    from mpidist.training.training_state import TrainingPosition

    old = {"epoch": 2, "step": 1, "rows": 4, "steps_made": 9, "last_rows": 4, "loss": float.hex(1.5)}
    position = TrainingPosition()
    position.restore(old)
    assert position.state() == {key: value for key, value in old.items() if key != "last_rows"} | {"batch_size": 0}
