"""`Trainer`, callbacks, metrics, optimizers, schedules, checkpoints."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy
from numpy.typing import NDArray

import mpidist
from mpidist.callbacks import CSVLogger, EarlyStopping, LearningRateScheduler, ModelCheckpoint

Array = NDArray[numpy.float64]


class Stop(mpidist.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None and logs["loss"] < 0.1:
            self.trainer.stop_training = True


def value_and_grad(parameters: list[Array], x: Array, y: Array) -> tuple[tuple[float, Array], list[Array]]:
    (w,) = parameters
    error = x @ w - y
    return (float((error**2).mean()), x @ w), [2 * x.T @ error / len(x)]


def predict(parameters: list[Array], x: Array) -> Array:
    return x @ parameters[0]


def main(folder: str) -> None:
    strategy = mpidist.MirroredStrategy()
    schedule = mpidist.optimizers.schedules.WarmUp(mpidist.optimizers.schedules.CosineDecay(0.1, 100), 10)
    with strategy.scope():
        w = mpidist.Variable([1.0, 2.0, 3.0], dtype="float64")
        optimizer = mpidist.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0)
        trainer = mpidist.Trainer(value_and_grad, [w], optimizer, metrics=["mse", mpidist.metrics.MeanAbsoluteError()],
                                  predict_fn=predict)  # fmt: skip
    x = numpy.random.default_rng(0).normal(size=(32, 3))
    callbacks = [EarlyStopping("loss", patience=2), CSVLogger(f"{folder}/log.csv"), Stop(),
                 ModelCheckpoint(f"{folder}/checkpoint.h5")]  # fmt: skip
    history = trainer.fit(x, x.sum(axis=1), batch_size=8, epochs=2, verbose=0, callbacks=callbacks,
                          validation_data=(x, x.sum(axis=1)))  # fmt: skip
    losses: list[float] = history.history["loss"]
    logs: dict[str, float] = trainer.evaluate(x, x.sum(axis=1), verbose=0, return_dict=True)
    predictions: Array = trainer.predict(x, verbose=0)
    assert len(losses) == 2 and "mse" in str(logs) and len(predictions) == 32
    checkpoint = mpidist.Checkpoint(w=w, optimizer=optimizer)
    manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=2)
    manager.save(optimizer.iterations)
    if manager.latest_checkpoint is not None:
        checkpoint.restore(manager.latest_checkpoint)
    scaled = mpidist.optimizers.LossScaleOptimizer(mpidist.optimizers.Adam(0.001, clipvalue=1.0))
    scaled.beta_1 = 0.5
    loss: float = scaled.scale_loss(1.0)
    assert loss > 1 and LearningRateScheduler(lambda epoch, rate: rate)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
