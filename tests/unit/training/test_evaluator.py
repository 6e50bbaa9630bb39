"""`SidecarEvaluator`: each checkpoint of a folder once, until the training has ended."""

from __future__ import annotations

import os

import numpy
import pytest

import mpidist
from mpidist.training.evaluator import SidecarEvaluator


class Training:
    """A variable and the checkpoints of it; each look at whether it has ended lets it go on by one entry of a plan.

    Parameters
    ----------
    folder : Path
    plan : sequence of list of float
        What is saved, look by look; it ends with the last.
    """

    def __init__(self, folder, plan):
        self.w = mpidist.Variable(numpy.zeros(3, "float32"))
        self.manager = mpidist.CheckpointManager(mpidist.Checkpoint(w=self.w), folder, max_to_keep=None)
        self.plan = list(plan)

    def ended(self):
        for value in self.plan.pop(0):
            self.w.assign(numpy.full(3, value, "float32"))
            self.manager.save()
        return not self.plan


def evaluator_of(training, folder, **options):
    """Return an evaluator with a variable of its own, whose logs are what it finds in it."""
    own = mpidist.Variable(numpy.zeros(3, "float32"))
    options = {"ended": training.ended, "poll_seconds": 0.0, **options}
    checkpoint = mpidist.Checkpoint(w=own)
    return SidecarEvaluator(
        lambda data: {"sum": float(own.value.sum()) + data}, 0.5, folder, checkpoint=checkpoint, **options
    )


def found(results):
    return [(result.path.name, result.logs["sum"]) for result in results]


def test_each_checkpoint_is_evaluated_once_and_the_last_before_the_end_too(tmp_path):
    training = Training(tmp_path, [[], [1.0], [], [], [2.0, 3.0], [], [4.0]])
    results = evaluator_of(training, tmp_path).start()
    assert found(results) == [(f"checkpoint-{n}.h5", 3 * n + 0.5) for n in (1, 2, 3, 4)]


def test_those_that_are_there_already_are_evaluated(tmp_path):
    training = Training(tmp_path, [[5.0, 6.0], []])
    training.ended()
    assert found(evaluator_of(training, tmp_path).start()) == [("checkpoint-1.h5", 15.5), ("checkpoint-2.h5", 18.5)]


def test_it_ends_after_so_many(tmp_path):
    training = Training(tmp_path, [[1.0, 2.0, 3.0], [], []])
    assert len(evaluator_of(training, tmp_path, max_evaluations=2).start()) == 2
    with pytest.raises(ValueError, match="max_evaluations must be 1 or more"):
        evaluator_of(training, tmp_path, max_evaluations=0)


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    training = Training(tmp_path, [[1.0, 2.0], []])
    training.ended()
    path = tmp_path / "checkpoint-1.h5"
    path.write_bytes(path.read_bytes()[:100])
    assert found(evaluator_of(training, tmp_path).start()) == [("checkpoint-2.h5", 6.5)]
    assert "checkpoint-1.h5" in caplog.text and "passes it over" in caplog.text


def test_a_number_that_is_saved_again_is_evaluated_again(tmp_path):
    training = Training(tmp_path, [[1.0], [], []])
    evaluator = evaluator_of(training, tmp_path, max_evaluations=2)

    def saved_again():
        training.w.assign(numpy.full(3, 7.0, "float32"))
        path = training.manager.save(1)
        os.utime(path, ns=(1, 1))
        return False

    looks = [training.ended, lambda: False, saved_again]
    evaluator._ended = lambda: looks.pop(0)()
    assert found(evaluator.start()) == [("checkpoint-1.h5", 3.5), ("checkpoint-1.h5", 21.5)]


def test_a_trainer_is_evaluated_on_the_variables_that_model_checkpoint_saves(tmp_path):
    x = numpy.arange(8, dtype="float32").reshape(4, 2)
    y = x @ numpy.array([1.0, -2.0], "float32")

    def value_and_grad(parameters, x, y):
        error = x @ parameters["w"] - y
        return float((error**2).mean()), {"w": 2 * x.T @ error / len(error)}

    def trainer():
        w = mpidist.Variable(numpy.zeros(2, "float32"))
        return mpidist.Trainer(value_and_grad, {"w": w}, mpidist.optimizers.SGD(0.01))

    trained = trainer()
    saving = mpidist.callbacks.ModelCheckpoint(tmp_path, max_to_keep=None)
    trained.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[saving], shuffle=False)
    results = SidecarEvaluator(trainer(), (x, y), tmp_path, ended=lambda: True).start()
    assert [result.path.name for result in results] == [f"checkpoint-{n}.h5" for n in (1, 2, 3)]
    losses = [result.logs["loss"] for result in results]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == trained.evaluate(x, y)


def test_a_function_needs_to_be_told_what_to_restore(tmp_path):
    with pytest.raises(TypeError, match="needs checkpoint=Checkpoint"):
        SidecarEvaluator(lambda data: {}, None, tmp_path)


def test_it_must_have_an_end(tmp_path):
    w = mpidist.Variable(numpy.zeros(1, "float32"))
    with pytest.raises(ValueError, match="nothing tells when the training has ended.*max_evaluations"):
        SidecarEvaluator(lambda data: {}, None, tmp_path, checkpoint=mpidist.Checkpoint(w=w))
