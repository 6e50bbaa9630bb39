"""`Estimator`: hooks, saves, evaluators, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist import estimator
from mpidist.data import Dataset
from mpidist.errors import CheckpointError, CheckpointNotFoundError
from mpidist.estimator import EstimatorSpec, ModeKeys, TrainOp
from mpidist.testing import run_ranks
from tests.unit.training import estimator_net as net
from tests.unit.training.softplus_net import loss, predict, value_and_grad


def rows(batch_size=4):
    return lambda: Dataset.from_arrays((net.X, net.Y)).batch(batch_size)


class Recorder(estimator.SessionRunHook):
    """Writes down what is called; asks for the end at a step."""

    def __init__(self, stop_at=None, fetches=None):
        self.calls, self.stop_at, self.fetches = [], stop_at, fetches

    def begin(self):
        self.calls.append("begin")

    def after_create(self, session):
        self.calls.append(("create", session.global_step))

    def before_run(self, run_context):
        self.calls.append("before")
        return None if self.fetches is None else estimator.SessionRunArgs(self.fetches)

    def after_run(self, run_context, run_values):
        self.calls.append(("after", run_values.results))
        if run_context.session.global_step == self.stop_at:
            run_context.request_stop()
            assert run_context.stop_requested

    def end(self, session):
        self.calls.append(("end", session.global_step))


# -- hooks and saves ---------------------------------------------------------------------------------------------------


def test_hooks_are_called_around_every_step(tmp_path):
    hook = Recorder(fetches={"step": "global_step", "loss": "loss"})
    trained = net.of(tmp_path)
    trained.train(rows(16), hooks=[hook])
    losses = [loss(net.by_hand(net.cut(16)[:step]), net.X[part], net.Y[part]) for step, part in enumerate(net.cut(16))]
    first, second = [call[1] for call in hook.calls if call[0] == "after"]
    assert (first["step"], second["step"]) == (1, 2)
    numpy.testing.assert_allclose([first["loss"], second["loss"]], losses, rtol=1e-12)
    names = [call if isinstance(call, str) else call[0] for call in hook.calls]
    assert names == ["begin", "create", "before", "after", "before", "after", "end"]
    assert (hook.calls[1], hook.calls[-1]) == (("create", 0), ("end", 2))
    again = Recorder()
    trained.train(rows(16), hooks=[again], steps=1)
    assert again.calls == ["begin", ("create", 2), "before", ("after", None), ("end", 3)]


def test_one_rank_that_asks_ends_the_training_of_all_after_the_same_step(tmp_path):
    def main():
        strategy = mpidist.MirroredStrategy()
        hooks = [Recorder(stop_at=3)] if strategy.extended.replica_id == 2 else []
        trained = net.of(tmp_path, strategy)
        trained.train(net.input_fn_of(2, repeats=True), hooks=hooks, steps=10)
        return trained.get_variable_value("global_step")

    assert run_ranks(3, main) == [3, 3, 3]


@pytest.mark.parametrize("how", [{"num_steps": 2}, {"last_step": 4}])
def test_stop_at_step_hook(tmp_path, how):
    trained = net.of(tmp_path)
    trained.train(rows(), steps=2)
    trained.train(rows(), hooks=[estimator.StopAtStepHook(**how)])
    assert trained.get_variable_value("global_step") == 4


def test_hooks_of_the_specification_and_of_the_chief(tmp_path):
    def main():
        both, chief, evaluation = Recorder(), Recorder(), Recorder()

        def model_fn(features, labels, mode):
            found = net.model_fn(features, labels, mode)
            found.training_hooks, found.training_chief_hooks, found.evaluation_hooks = [both], [chief], [evaluation]
            return found

        strategy = mpidist.MirroredStrategy()
        config = estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
        found = estimator.Estimator(model_fn, tmp_path, config)
        found.train(net.input_fn_of(4), steps=1)
        found.evaluate(net.input_fn_of(4), steps=2)
        return len(both.calls), len(chief.calls), evaluation.calls.count("before")

    assert run_ranks(2, main) == [(5, 5, 2), (5, 0, 2)]


def test_a_hook_ends_an_evaluation(tmp_path):
    trained = net.of(tmp_path)
    trained.train(rows(), steps=1)
    hook = Recorder(stop_at=1)  # the global step, which does not change
    found = trained.evaluate(rows(4), hooks=[hook])
    expected = loss(net.by_hand(net.cut(4)[:1]), net.X[:4], net.Y[:4])
    numpy.testing.assert_allclose(found["loss"], expected, rtol=1e-12)


class Listener(estimator.CheckpointSaverListener):
    def __init__(self, stop_at=None):
        self.calls, self.stop_at = [], stop_at

    def begin(self):
        self.calls.append("begin")

    def before_save(self, session, global_step_value):
        self.calls.append(f"before {global_step_value}")

    def after_save(self, session, global_step_value):
        self.calls.append(f"after {global_step_value}")
        return global_step_value == self.stop_at

    def end(self, session, global_step_value):
        self.calls.append(f"end {global_step_value}")


def test_listeners_see_saves_and_end_the_training(tmp_path):
    listener = Listener(stop_at=4)
    trained = net.of(tmp_path, save_checkpoints_steps=2)
    trained.train(rows(), saving_listeners=[listener])
    assert listener.calls[:5] == ["begin", "before 2", "after 2", "before 4", "after 4"]
    assert listener.calls[-1] == "end 4"
    assert trained.get_variable_value("global_step") == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_saves_by_the_clock_and_what_is_kept(tmp_path, ranks):
    def main():
        # every moment is later than that, so a save is due at each step
        config = {"save_checkpoints_secs": 1e-9, "keep_checkpoint_max": 3}
        listener = Listener()
        trained = net.of(tmp_path, mpidist.MirroredStrategy(), **config)
        trained.train(net.input_fn_of(1, repeats=True), steps=6, saving_listeners=[listener])
        return [call for call in listener.calls if call.startswith("after")]

    for calls in run_ranks(ranks, main):
        assert calls == [f"after {step}" for step in range(1, 7)]
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == [f"checkpoint-{step}.h5" for step in (4, 5, 6)]


def test_without_times_there_is_one_save_at_the_end(tmp_path):
    trained = net.of(tmp_path, save_checkpoints_steps=None, save_checkpoints_secs=None)
    trained.train(rows(1))
    assert [path.name for path in tmp_path.glob("*.h5")] == [f"checkpoint-{net.ROWS}.h5"]
    assert trained.latest_checkpoint() == str(tmp_path / f"checkpoint-{net.ROWS}.h5")
    assert trained.get_variable_names() == ["b1", "global_step", "w1", "w2"]


def test_a_step_that_is_reached_is_not_trained_again(tmp_path, caplog):
    trained = net.of(tmp_path)
    trained.train(rows(), max_steps=3)
    with caplog.at_level(logging.INFO, "mpidist"):
        trained.train(lambda: pytest.fail("called"), max_steps=3)
    assert "Skipping training since max_steps has already saved" in caplog.text


def test_the_loss_is_logged_as_often_as_asked_for(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "mpidist"):
        net.of(tmp_path, log_step_count_steps=3).train(rows())
    assert [record.args[1] for record in caplog.records if "steps/s" in record.msg] == [3, 6]
    assert "Loss for final step" in caplog.text


def test_a_loss_that_is_nan_ends_the_training_before_it_is_saved(tmp_path):
    def main():
        strategy = mpidist.MirroredStrategy()

        def input_fn():
            x = net.X.copy()
            x[6] = numpy.nan  # in the batch of rank 1 at the second step
            return Dataset.from_arrays((x, net.Y)).batch(2)

        trained = net.of(tmp_path, strategy, save_checkpoints_steps=1)
        with pytest.raises(estimator.NanLossDuringTrainingError, match="loss of global step 2 is NaN"):
            trained.train(input_fn)
        return trained.get_variable_value("global_step")

    assert run_ranks(2, main) == [1, 1]


def test_a_training_that_failed_before_its_first_save_begins_anew(tmp_path):
    def broken():
        x = net.X.copy()
        x[9] = numpy.nan  # in the third batch
        return Dataset.from_arrays((x, net.Y)).batch(4)

    trained = net.of(tmp_path)
    with pytest.raises(estimator.NanLossDuringTrainingError, match="global step 3"):
        trained.train(broken)
    trained.train(rows(), steps=2)
    assert trained.get_variable_value("global_step") == 2
    net.assert_same(net.values(trained), net.by_hand(net.cut(4)[:2]))


# -- evaluation and prediction -----------------------------------------------------------------------------------------


def test_a_model_that_was_never_trained_is_evaluated_with_a_warning(tmp_path, caplog):
    found = net.of(tmp_path).evaluate(rows(), steps=1)
    assert "Could not find trained model" in caplog.text
    numpy.testing.assert_allclose(found["loss"], loss(net.initial(), net.X[:4], net.Y[:4]), rtol=1e-12)
    assert found["global_step"] == 0


def test_a_model_that_was_never_trained_is_not_that_of_another_checkpoint(tmp_path):
    net.of(tmp_path / "trained").train(rows(), steps=3)
    found = net.of(tmp_path / "empty")
    other = found.evaluate(rows(), checkpoint_path=tmp_path / "trained" / "checkpoint-3.h5")
    numpy.testing.assert_allclose(other["loss"], loss(net.by_hand(net.cut(4)[:3]), net.X, net.Y), rtol=1e-12)
    results = found.evaluate(rows())
    numpy.testing.assert_allclose(results["loss"], loss(net.initial(), net.X, net.Y), rtol=1e-12)
    assert results["global_step"] == 0


def test_an_older_checkpoint_is_evaluated_by_its_path(tmp_path):
    trained = net.of(tmp_path, save_checkpoints_steps=1)
    trained.train(rows(), steps=3)
    found = trained.evaluate(rows(), checkpoint_path=tmp_path / "checkpoint-2.h5", name="older")
    expected = net.by_hand(net.cut(4)[:2])
    numpy.testing.assert_allclose(found["loss"], loss(expected, net.X, net.Y), rtol=1e-12)
    assert found["global_step"] == 2
    (line,) = (tmp_path / "eval_older" / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line) == found
    ours = numpy.array(list(trained.predict(rows(), checkpoint_path=tmp_path / "checkpoint-2.h5")))
    numpy.testing.assert_allclose(ours, predict(expected, net.X), rtol=1e-12)


def test_predictions_that_are_a_dict_by_row_by_batch_and_by_key(tmp_path):
    def model_fn(features, mode):
        found = net.model_fn(features, None, mode)
        found.predictions = lambda parameters, x: {"p": predict(parameters, x), "x": x}
        return found

    found = estimator.Estimator(model_fn, tmp_path)
    single = list(found.predict(rows()))
    assert len(single) == net.ROWS and single[3].keys() == {"p", "x"}
    assert (single[3]["x"] == net.X[3]).all()
    batches = list(found.predict(rows(), predict_keys=["x"], yield_single_examples=False))
    assert [each["x"].shape for each in batches] == [(4, 3)] * 7 + [(1, 3)]
    assert batches[0].keys() == {"x"}
    with pytest.raises(ValueError, match=r"Expected to run at least one output from \['p', 'x'\]"):
        next(found.predict(rows(), predict_keys=["z"]))


def test_predict_keys_of_predictions_that_are_no_dict(tmp_path):
    with pytest.raises(ValueError, match="the predictions are a ndarray"):
        next(net.of(tmp_path).predict(rows(), predict_keys=["p"]))


def test_a_later_call_does_not_change_predictions_under_way(tmp_path):
    trained = net.of(tmp_path)
    trained.train(rows(), steps=1)
    early = trained.predict(rows(1))
    next(early)
    trained.train(rows(), steps=3)
    list(trained.predict(rows()))
    rest = numpy.array(list(early))
    numpy.testing.assert_allclose(rest, predict(net.by_hand(net.cut(4)[:1]), net.X[1:]), rtol=1e-12)


def test_a_metric_of_one_entry_of_the_predictions(tmp_path):
    def model_fn(features, labels, mode):
        w = mpidist.Variable(numpy.ones(1))
        return EstimatorSpec(
            mode,
            lambda parameters, x: {"a": x, "b": 0 * x},
            lambda parameters, x, y: 0.0,
            eval_metric_ops={"a": ("mse", "a"), "b": (mpidist.metrics.MeanSquaredError(), "b"), "c": ("mse", "c")}
            if labels.shape[1:] == (2,)
            else {"a": ("mse", "a"), "b": (mpidist.metrics.MeanSquaredError(), "b")},
            variables=[w],
        )

    found = estimator.Estimator(model_fn, tmp_path)
    x = numpy.arange(6.0).reshape(3, 2)
    results = found.evaluate(lambda: [(x[:, :1], x[:, 1:])])
    assert results == {"a": 1.0, "b": float((x[:, 1] ** 2).mean()), "global_step": 0, "loss": 0.0}
    with pytest.raises(ValueError, match="metric 'c' is about 'c' of the predictions, which are 'a', 'b'"):
        found.evaluate(lambda: [(x, x)])


# -- train_and_evaluate ------------------------------------------------------------------------------------------------


class Exporter:
    """Keeps what it is told."""

    name = "kept"

    def __init__(self):
        self.told = []

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        self.told.append((Path(checkpoint_path).name, eval_result["global_step"], is_the_final_export))
        return export_path


@pytest.mark.parametrize("ranks", [1, 2])
def test_new_checkpoints_are_evaluated_and_the_last_one(tmp_path, ranks):
    def main():
        exporter = Exporter()
        trained = net.of(tmp_path, mpidist.MirroredStrategy(), save_checkpoints_steps=2)
        results, exports = estimator.train_and_evaluate(
            trained,
            estimator.TrainSpec(net.input_fn_of(2, repeats=True), max_steps=5),
            estimator.EvalSpec(net.input_fn_of(2), steps=None, throttle_secs=0, exporters=exporter),
        )
        return results["global_step"], exports, exporter.told

    for step, exports, told in run_ranks(ranks, main):
        assert (step, exports) == (5, [str(tmp_path / "export" / "kept")])
        seen = [(name, number) for name, number, _ in told]
        assert sorted(set(seen)) == [(f"checkpoint-{number}.h5", number) for number in (2, 4, 5)]
        assert [final for _, _, final in told] == [False] * (len(told) - 1) + [True]
    lines = (tmp_path / "eval" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["global_step"] for line in lines] == [2, 4, 5]


def test_a_throttle_leaves_out_evaluations_but_the_last(tmp_path):
    trained = net.of(tmp_path, save_checkpoints_steps=1)
    estimator.train_and_evaluate(
        trained, estimator.TrainSpec(rows(), max_steps=5), estimator.EvalSpec(rows(), throttle_secs=3600)
    )
    lines = (tmp_path / "eval" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["global_step"] for line in lines] == [1, 5]


def test_where_nothing_is_left_to_train_there_is_an_evaluation(tmp_path):
    net.of(tmp_path).train(rows(), max_steps=2)
    spec = estimator.TrainSpec(rows(), max_steps=2)
    results, _ = estimator.train_and_evaluate(net.of(tmp_path), spec, estimator.EvalSpec(rows()))
    assert results["global_step"] == 2


def evaluator_environment(monkeypatch):
    config = {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_an_evaluator_of_its_own_ends_with_the_last_step(tmp_path, monkeypatch):
    trained = net.of(tmp_path, save_checkpoints_steps=2)
    trained.train(rows(), max_steps=5)
    evaluator_environment(monkeypatch)
    exporter = Exporter()
    results, _ = estimator.train_and_evaluate(
        net.of(tmp_path), estimator.TrainSpec(rows(), max_steps=5), estimator.EvalSpec(rows(), None, exporters=exporter)
    )
    numpy.testing.assert_allclose(results["loss"], loss(net.by_hand(net.cut(4)[:5]), net.X, net.Y), rtol=1e-12)
    assert exporter.told == [("checkpoint-5.h5", 5, True)]


def test_an_evaluator_passes_over_nothing_but_what_it_cannot_restore(tmp_path, monkeypatch, caplog):
    trained = net.of(tmp_path, save_checkpoints_steps=2)
    trained.train(rows(), max_steps=4)
    evaluator_environment(monkeypatch)
    spec = estimator.TrainSpec(rows(), max_steps=4)

    def warm_start(features, labels, mode):
        mpidist.Checkpoint(w=mpidist.Variable(0.0)).restore(tmp_path / "warm.h5")

    by_model = estimator.Estimator(warm_start, tmp_path, estimator.RunConfig())
    with pytest.raises(CheckpointNotFoundError, match=r"warm\.h5"):
        estimator.train_and_evaluate(by_model, spec, estimator.EvalSpec(rows(), start_delay_secs=0))

    class Saving(estimator.SessionRunHook):
        def end(self, session):
            raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match="the disk is full"):
        estimator.train_and_evaluate(net.of(tmp_path), spec, estimator.EvalSpec(rows(), None, hooks=[Saving()]))
    assert "passes it over" not in caplog.text

    def last_steps():
        # looked at when checkpoint 4 was found: another job takes it away, and then saves the next one
        (tmp_path / "checkpoint-4.h5").unlink(missing_ok=True)
        if not (tmp_path / "checkpoint-5.h5").exists():
            shutil.copy(tmp_path / "checkpoint-2.h5", tmp_path / "checkpoint-5.h5")
        return rows()()

    spec = estimator.TrainSpec(rows(), max_steps=2)
    results, _ = estimator.train_and_evaluate(net.of(tmp_path), spec, estimator.EvalSpec(last_steps, None))
    assert results["global_step"] == 2 and "checkpoint-4.h5" in caplog.text and "passes it over" in caplog.text


class OnServer(estimator.RunConfig):
    """Says itself which task it is."""

    @property
    def task_type(self):
        return "ps"


@dataclasses.dataclass(frozen=True)
class Named(estimator.RunConfig):
    """Has another field, and one that is computed."""

    name: str = "mine"
    upper: str = dataclasses.field(init=False, default="")

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "upper", self.name.upper())


def test_a_class_derived_from_run_config_has_properties_and_fields_of_its_own():
    config = OnServer(tf_random_seed=1)
    assert (config.task_type, config.is_chief, config.replace(tf_random_seed=2).task_type) == ("ps", True, "ps")
    named = Named(name="other")
    assert (named.upper, named.num_worker_replicas, named.replace(tf_random_seed=2).upper) == ("OTHER", 1, "OTHER")


def test_an_evaluator_without_an_end_is_refused_and_does_not_train(tmp_path, monkeypatch):
    evaluator_environment(monkeypatch)
    with pytest.raises(ValueError, match="ends at max_steps"):
        estimator.train_and_evaluate(net.of(tmp_path), estimator.TrainSpec(rows()), estimator.EvalSpec(rows()))
    with pytest.raises(RuntimeError, match="this process is the evaluator"):
        net.of(tmp_path).train(rows())
    with pytest.raises(ValueError, match="an evaluator needs model_dir"):
        net.of(None)


# -- what is refused ---------------------------------------------------------------------------------------------------


def of_model(model_fn, **options):
    return lambda folder: estimator.Estimator(model_fn, folder, **options)


def spec_of(**changes):
    """Return a model function whose specification has these arguments in place of right ones."""

    def model_fn(features, labels, mode):
        right = {
            "predictions": predict,
            "loss": loss,
            "train_op": TrainOp(mpidist.optimizers.SGD(0.1), value_and_grad),
            "variables": net.model_fn(features, labels, ModeKeys.EVAL).variables,
        }
        return EstimatorSpec(changes.pop("mode", mode), **{**right, **changes})

    return model_fn


MADE = {
    "no function": (lambda folder: estimator.Estimator(3, folder), TypeError, "model_fn must be a function, got int"),
    "unknown arguments": (of_model(lambda features, lables, mode: 0), ValueError, r"not expected args: \['lables'\]"),
    "no features": (of_model(lambda labels, mode: 0), ValueError, "must include features argument"),
    "no params": (of_model(lambda features: 0, params={"a": 1}), ValueError, "does not include params argument"),
    "a config of another type": (of_model(net.model_fn, config=3), TypeError, "must be an instance of `RunConfig`"),
    "a folder that is none": (lambda folder: estimator.Estimator(net.model_fn, " "), ValueError, "empty path"),
    "two folders": (
        of_model(net.model_fn, config=estimator.RunConfig(model_dir="elsewhere")),
        ValueError,
        "`model_dir` are set both in constructor and `RunConfig`",
    ),
    "a strategy that is none": (lambda f: estimator.RunConfig(train_distribute="mirrored"), TypeError, "got str"),
    "a negative number": (lambda f: estimator.RunConfig(keep_checkpoint_max=-1), ValueError, "must be 0 or more"),
    "no steps in the log": (lambda f: estimator.RunConfig(log_step_count_steps=0), ValueError, "must be positive"),
    "a setting that is none": (lambda f: estimator.RunConfig().replace(x=1), ValueError, "Replacing x is not"),
    "a hook of the wrong type": (
        lambda f: estimator.TrainSpec(rows(), hooks=[3]),
        TypeError,
        "must be a SessionRunHook",
    ),
    "hooks that are no list": (lambda f: estimator.EvalSpec(rows(), hooks=3), TypeError, "in a list; got int"),
    "an exporter that is none": (lambda f: estimator.EvalSpec(rows(), exporters=[3]), TypeError, "`exporters` must"),
    "no input_fn": (lambda f: estimator.TrainSpec(None), TypeError, "input_fn must be a function"),
    "both steps of a hook": (lambda f: estimator.StopAtStepHook(1, 2), ValueError, "one of them"),
}

TRAINED = {
    "a number": (of_model(lambda features, labels, mode: 0), TypeError, "should return an EstimatorSpec, got int"),
    "another mode": (of_model(spec_of(mode=ModeKeys.EVAL)), ValueError, "of mode 'eval' for 'train'"),
    "an unknown mode": (of_model(spec_of(mode="fit")), ValueError, "mode must be one of ModeKeys"),
    "no loss": (of_model(spec_of(loss=None)), ValueError, "Missing loss."),
    "no train_op": (of_model(spec_of(train_op=None)), ValueError, "Missing train_op."),
    "no variables": (of_model(spec_of(variables=None)), ValueError, "Missing variables"),
    "a loss that is a number": (of_model(spec_of(loss=0.5)), TypeError, "loss must be a function"),
    "a train_op that is none": (
        of_model(spec_of(train_op=3)),
        TypeError,
        "train_op must be a mpidist.estimator.TrainOp",
    ),
    "no optimizer": (of_model(spec_of(train_op=TrainOp("SGD", loss))), TypeError, "optimizer of a TrainOp must be"),
    "a hook of the wrong type": (of_model(spec_of(training_hooks=[3])), TypeError, "Hooks must be a SessionRunHook"),
    "arrays as variables": (of_model(spec_of(variables=[net.X])), TypeError, "variables must be made by"),
    "a metric that is none": (of_model(spec_of(eval_metric_ops={"a": 3})), TypeError, "a metric is a"),
    "a metric called loss": (of_model(spec_of(eval_metric_ops={"loss": "mse"})), ValueError, "has already"),
    "a model without labels": (of_model(lambda features: 0), ValueError, "model_fn .* does not take labels"),
}

INPUTS = {
    "nothing": (lambda: None, TypeError, "returned None .is a `return` missing"),
    "arrays": (lambda: (net.X, net.Y), TypeError, "returned a tuple; return a mpidist.data.Dataset"),
    "an array": (lambda: net.X, TypeError, "returned a ndarray"),
    "a number": (lambda: 3, TypeError, "returned a int"),
    "rows": (lambda: Dataset.from_arrays((net.X, net.Y)), ValueError, "call `batch`"),
    "three parts": (lambda: Dataset.from_arrays((net.X, net.Y, net.Y)).batch(2), ValueError, "got a tuple of 3"),
    "no batch": (lambda: Dataset.from_arrays((net.X, net.Y)).batch(2).take(0), ValueError, "gives no batch"),
}

CALLED = {
    "both steps": ({"steps": 1, "max_steps": 1}, ValueError, "Can not provide both steps and max_steps"),
    "no steps": ({"steps": 0}, ValueError, "Must specify steps > 0, given: 0"),
    "negative steps": ({"max_steps": -1}, ValueError, "Must specify max_steps > 0, given: -1"),
    "a hook of the wrong type": ({"hooks": [print]}, TypeError, "must be a SessionRunHook, given: <built-in"),
    "a listener of the wrong type": ({"saving_listeners": [3]}, TypeError, "CheckpointSaverListener, given: 3"),
    "a hook that fetches what is not there": (
        {"hooks": [Recorder(fetches="acc")]},
        ValueError,
        "'loss', 'global_step'",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_refused_when_made(tmp_path, name):
    make, error, message = MADE[name]
    with pytest.raises(error, match=message):
        make(tmp_path)


@pytest.mark.parametrize("name", TRAINED)
def test_refused_models(tmp_path, name):
    make, error, message = TRAINED[name]
    with pytest.raises(error, match=message):
        make(tmp_path).train(rows())


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("verb", ["train", "evaluate", "predict"])
def test_refused_inputs(tmp_path, name, verb):
    input_fn, error, message = INPUTS[name]
    with pytest.raises(error, match=message):
        getattr(net.of(tmp_path), verb)(input_fn)


@pytest.mark.parametrize("name", CALLED)
def test_refused_calls(tmp_path, name):
    options, error, message = CALLED[name]
    with pytest.raises(error, match=message):
        net.of(tmp_path).train(rows(), **options)


def test_a_hook_that_returns_something_else_is_refused(tmp_path):
    class Wrong(estimator.SessionRunHook):
        def before_run(self, run_context):
            return ["loss"]

    with pytest.raises(TypeError, match="before_run of Wrong must return a SessionRunArgs or None"):
        net.of(tmp_path).train(rows(), hooks=[Wrong()])


def test_an_evaluation_needs_no_train_op_and_a_prediction_predictions(tmp_path):
    with pytest.raises(ValueError, match=r"Missing loss\."):
        estimator.Estimator(spec_of(loss=None), tmp_path).evaluate(rows())
    with pytest.raises(ValueError, match=r"Missing predictions\."):
        estimator.Estimator(spec_of(predictions=None), tmp_path).predict(rows())


def test_variables_of_another_strategy_are_refused(tmp_path):
    outside = mpidist.Variable(numpy.zeros(1))
    config = estimator.RunConfig(train_distribute=mpidist.MirroredStrategy())
    with pytest.raises(ValueError, match="model_fn must make its variables itself"):
        estimator.Estimator(spec_of(variables=[outside]), tmp_path, config).train(rows())


def test_a_checkpoint_of_another_model_is_refused_and_the_difference_named(tmp_path):
    net.of(tmp_path).train(rows(), steps=1)

    def wider(features, labels, mode):
        w1 = mpidist.Variable(numpy.zeros((3, 7)), name="w1")
        train_op = TrainOp(mpidist.optimizers.SGD(0.1), value_and_grad)
        return EstimatorSpec(mode, predict, loss, train_op, variables={"w1": w1})

    with pytest.raises(CheckpointError, match=r"'variables/w1' is float64\[3, 5\] there, expected float64\[3, 7\]"):
        estimator.Estimator(wider, tmp_path).train(rows())
    with pytest.raises(CheckpointError, match=r"'variables/w1' is float64\[3, 5\] there"):
        estimator.Estimator(wider, tmp_path).evaluate(rows())


def test_a_checkpoint_that_no_estimator_has_saved_is_refused(tmp_path):
    mpidist.Checkpoint(variables=[mpidist.Variable(1.0)]).save(tmp_path / "checkpoint-1.h5")
    with pytest.raises(CheckpointError, match="it has nothing for 'training'"):
        net.of(tmp_path).train(rows())


def test_a_folder_that_cannot_be_written_to_is_told_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    hook = Recorder()
    with pytest.raises(CheckpointError, match="no checkpoint can be written to"):
        net.of(tmp_path / "file" / "folder").train(rows(), hooks=[hook])
    assert hook.calls == []


def test_variables_of_no_checkpoint(tmp_path):
    found = net.of(tmp_path)
    assert found.latest_checkpoint() is None
    with pytest.raises(CheckpointNotFoundError, match="train first"):
        found.get_variable_names()
    found.train(rows(), steps=1)
    with pytest.raises(ValueError, match=r"has no variable 'w3'; it has \['b1', 'global_step', 'w1', 'w2'\]"):
        found.get_variable_value("w3")


def test_several_ranks_without_a_strategy_do_not_train(tmp_path):
    def main():
        found = net.of(tmp_path)
        with pytest.raises(ValueError, match="2 ranks are to train, and train_distribute is None"):
            found.train(rows())
        return found.evaluate(rows())["loss"]  # by each rank for itself

    expected = loss(net.initial(), net.X, net.Y)
    numpy.testing.assert_allclose(run_ranks(2, main), [expected] * 2, rtol=1e-12)


def test_a_temporary_folder_is_the_same_on_all_ranks(caplog):
    def main():
        found = net.of(None, mpidist.MirroredStrategy())
        found.train(net.input_fn_of(4), steps=1)
        return found.model_dir, found.config.model_dir, found.get_variable_value("global_step")

    (first, second) = run_ranks(2, main)
    assert first == second and first[0] == first[1] and first[2] == 1
    assert caplog.text.count("Using temporary folder as model directory") == 1


def test_params_are_copies(tmp_path):
    given = {"rates": [0.1]}

    def model_fn(features, labels, mode, params, config):
        params["rates"].append(1)
        assert config.model_dir == str(tmp_path)
        return net.model_fn(features, labels, mode)

    found = estimator.Estimator(model_fn, tmp_path, params=given)
    given["rates"].append(2)
    found.train(rows(), steps=1)
    found.params["rates"].append(3)
    assert found.params == {"rates": [0.1]} and found.model_fn is model_fn


def test_input_functions_get_what_they_name(tmp_path):
    seen = []

    def input_fn(mode, params, config, input_context):
        seen.append((mode, params, config.model_dir, input_context))
        return rows()()

    found = estimator.Estimator(lambda features, labels, mode, params: net.model_fn(features, labels, mode), tmp_path)
    found.train(input_fn, steps=1)
    found.evaluate(input_fn)
    list(found.predict(input_fn))
    assert [each[0] for each in seen] == [ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT]
    assert {each[2:] for each in seen} == {(str(tmp_path), mpidist.InputContext(1, 0, 1))}


def test_replacing_a_time_of_saves_takes_the_other_away():
    config = estimator.RunConfig().replace(save_checkpoints_steps=5)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (5, None)
    config = config.replace(save_checkpoints_secs=7, model_dir="x")
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs, config.model_dir) == (None, 7, "x")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cluster": {"chief": ["a:1"]}, "task": {"index": 0}}, "task type must be set"),
        ({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief"}}, "task index must be set"),
        ({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": -1}}, "must be non-negative"),
        ({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 1}}, "1 is not a valid task_id"),
        ({"task": {"type": "chief", "index": 0}}, "must be worker 0, got chief 0"),
        (["cluster"], "must be a JSON object"),
    ],
)
def test_a_cluster_that_is_wrong(monkeypatch, config, message):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match=message):
        estimator.RunConfig()
