"""TensorFlow's observed cases of Estimator and RunConfig, and of Keras 2, which was recorded beside them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

import mpidist
from mpidist import estimator as tf_estimator
from mpidist.data import Dataset
from mpidist.testing import run_ranks
from tests.oracle.cases import EXCEPTIONS, cases
from tests.oracle.deviations import DEVIATIONS
from tests.unit.oracle.table import assert_value

CASES = cases("estimator")
#: Cases of RunConfig() under TF_CONFIG.
CONFIGS = [name for name, case in CASES.items() if case["description"] == "RunConfig() under TF_CONFIG"]
SETTINGS = [
    "save_checkpoints_secs",
    "save_checkpoints_steps",
    "keep_checkpoint_max",
    "save_summary_steps",
    "log_step_count_steps",
    "tf_random_seed",
    "keep_checkpoint_every_n_hours",
]


def nothing() -> None:
    """An input function that is never called."""


#: Case -> what it does, which TensorFlow refuses.
REFUSED = {
    "runconfig_both_saves": lambda: tf_estimator.RunConfig(save_checkpoints_secs=1, save_checkpoints_steps=1),
    "trainspec_bad_steps": lambda: tf_estimator.TrainSpec(nothing, max_steps=0),
    "evalspec_bad_steps": lambda: tf_estimator.EvalSpec(nothing, steps=0),
    "evalspec_bad_delay": lambda: tf_estimator.EvalSpec(nothing, start_delay_secs=-1),
    "evalspec_bad_throttle": lambda: tf_estimator.EvalSpec(nothing, throttle_secs=-1),
}


def expected(name: str) -> Any:
    return CASES[name]["expected"]


def seen_of(config: tf_estimator.RunConfig) -> dict[str, Any]:
    of_task = "task_type task_id is_chief master evaluation_master num_ps_replicas num_worker_replicas".split()
    found = {name: getattr(config, name) for name in [*of_task, "global_id_in_cluster", *SETTINGS]}
    return {**found, "cluster_spec": config.cluster_spec.as_dict()}


@pytest.mark.parametrize("name", ["runconfig_default", *CONFIGS])
def test_run_config(name, monkeypatch):
    given = CASES[name]["input"]
    if given:
        monkeypatch.setenv("TF_CONFIG", json.dumps(given))
    if "raises" not in expected(name):
        assert seen_of(tf_estimator.RunConfig()) == expected(name)
        return
    with pytest.raises(EXCEPTIONS[expected(name)["raises"]]) as raised:
        tf_estimator.RunConfig()
    said = expected(name)["message"].partition("ClusterSpec(")
    assert str(raised.value).startswith(said[0])


def test_a_strategy_stays_in_the_config():
    config = tf_estimator.RunConfig(train_distribute=mpidist.MirroredStrategy())
    assert type(config.train_distribute).__name__ == expected("runconfig_mwms_cluster_no_chief")


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings(name):
    error = EXCEPTIONS[expected(name)["raises"]]
    with pytest.raises(error, match=re.escape(expected(name)["message"])):
        REFUSED[name]()


def test_evalspec_defaults():
    spec = tf_estimator.EvalSpec(nothing)
    assert {name: getattr(spec, name) for name in expected("evalspec_defaults")} == expected("evalspec_defaults")


def linear(given: dict[str, Any], folder: str) -> dict[str, Any]:
    x, y = numpy.array(given["x"], "float32"), numpy.array(given["y"], "float32")
    calls = []

    def input_fn():
        calls.append(1)
        return Dataset.from_arrays(({"feats": x}, y)).repeat().batch(given["per_replica_batch"])

    strategy = mpidist.MirroredStrategy()
    config = tf_estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    columns = [mpidist.feature_column.numeric_column("feats", shape=(2,))]
    regressor = tf_estimator.LinearRegressor(
        columns, folder, optimizer=lambda: mpidist.optimizers.SGD(0.1), config=config
    )
    regressor.train(input_fn, steps=given["steps"])
    results = regressor.evaluate(input_fn, steps=2)
    names = [name for name in regressor.get_variable_names() if name != "global_step"]
    return {
        "variables": {name: regressor.get_variable_value(name).tolist() for name in names},
        "evaluate": results,
        "input_fn_calls": len(calls),
    }


def test_estimator_linear_n2(tmp_path):
    case = CASES["estimator_linear_n2"]
    for found in run_ranks(2, linear, case["input"], str(tmp_path)):
        assert found["input_fn_calls"] == case["expected"]["input_fn_calls"]
        for part in ("evaluate", "variables"):
            assert found[part].keys() == case["expected"][part].keys()
            for name, value in case["expected"][part].items():
                numpy.testing.assert_allclose(found[part][name], value, rtol=2e-6, err_msg=name)


def test_the_guides_example(tmp_path):
    """TensorFlow's guide shows these four numbers."""

    def input_fn():
        return Dataset.from_tensors(({"feats": [1.0]}, [1.0])).repeat(1000).batch(10)

    strategy = mpidist.MirroredStrategy()
    config = tf_estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    regressor = tf_estimator.LinearRegressor(
        feature_columns=[mpidist.feature_column.numeric_column("feats")],
        optimizer="SGD",
        model_dir=tmp_path,
        config=config,
    )
    regressor.train(input_fn=input_fn, steps=10)
    found = regressor.evaluate(input_fn=input_fn, steps=10)
    assert list(found) == ["average_loss", "global_step", "label/mean", "loss", "prediction/mean"]
    assert (found["global_step"], found["label/mean"]) == (10, 1.0)
    assert found["loss"] == found["average_loss"] == pytest.approx(1.4210855e-14)
    assert found["prediction/mean"] == pytest.approx(0.99999994, abs=1e-7)


def slope_model(features: Any, labels: Any, mode: str) -> tf_estimator.EstimatorSpec:
    """One weight, the mean squared error, SGD with 0.1."""
    w = mpidist.Variable(numpy.float32(0), name="w")

    def predict(parameters, features):
        return parameters["w"] * features

    def loss(parameters, features, labels):
        return ((predict(parameters, features) - labels) ** 2).mean()

    def value_and_grad(parameters, features, labels):
        error = predict(parameters, features) - labels
        return loss(parameters, features, labels), {"w": (2 * error * features).mean()}

    is_trained = mode == tf_estimator.ModeKeys.TRAIN
    train_op = tf_estimator.TrainOp(mpidist.optimizers.SGD(0.1), value_and_grad) if is_trained else None
    return tf_estimator.EstimatorSpec(mode, predict, loss, train_op, variables={"w": w})


X = numpy.arange(1, 9, dtype="float32")


def custom(folder: str) -> dict[str, Any]:
    strategy = mpidist.MirroredStrategy()
    config = tf_estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    trained = tf_estimator.Estimator(slope_model, folder, config)

    def input_fn():
        return Dataset.from_arrays((X, 2 * X)).batch(2)

    trained.train(input_fn)
    found = trained.evaluate(input_fn)
    return {
        "w": float(trained.get_variable_value("w")),
        **found,
        "predict": [float(each) for each in trained.predict(input_fn)],
    }


def test_estimator_custom_n2(tmp_path):
    replicas = CASES["estimator_custom_n2"]["input"]["replicas"]
    for found in run_ranks(replicas, custom, str(tmp_path)):
        assert found.keys() == expected("estimator_custom_n2").keys()
        for name, value in expected("estimator_custom_n2").items():
            numpy.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_steps_and_max_steps(tmp_path):
    trained = tf_estimator.Estimator(slope_model, tmp_path)

    def input_fn():
        return Dataset.from_arrays((X / 8, X / 4)).repeat().batch(2)

    steps = []
    for how in ({"steps": 3}, {"steps": 3}, {"max_steps": 5}):
        trained.train(input_fn, **how)
        steps.append(trained.get_variable_value("global_step"))
    assert steps == expected("estimator_steps_vs_max_steps")


def test_two_evaluations_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = tf_estimator.Estimator(slope_model, "q")
    assert trained.eval_dir("x") == expected("estimator_two_strategy_names")
    trained.evaluate(lambda: Dataset.from_arrays((X, X)).batch(8), name="x")
    (line,) = Path("q", "eval_x", "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line) == {"global_step": 0, "loss": float((X**2).mean())}
    assert os.listdir("q") == ["eval_x"]


# -- Keras 2, recorded with the same TensorFlow ------------------------------------------------------------------------


def keras_fit(given: dict[str, Any]) -> dict[str, Any]:
    strategy = mpidist.MirroredStrategy() if given["replicas"] else mpidist.get_strategy()
    x, y = numpy.array(given["x"], "float32"), numpy.array(given["y"], "float32")
    with strategy.scope():
        kernel = mpidist.Variable(numpy.full((2, 1), given["kernel0"], "float32"))
        bias = mpidist.Variable(numpy.zeros(1, "float32"))

    def value_and_grad(parameters, x, y):
        error = x @ parameters[0] + parameters[1] - y
        return ((error**2).mean(), error + y), [2 * x.T @ error / len(x), 2 * error.mean(axis=0)]

    trainer = mpidist.Trainer(value_and_grad, [kernel, bias], mpidist.optimizers.SGD(0.1), ["mae"])
    history = trainer.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "kernel": kernel.numpy().ravel(), "bias": bias.numpy()}


@pytest.mark.parametrize("name", ["keras2_fit_n0", "keras2_fit_n4"])
def test_keras2_fit(name):
    given = CASES[name]["input"]
    for found in run_ranks(max(given["replicas"], 1), keras_fit, given):
        wanted = expected(name)
        assert found["history"].keys() == wanted["history"].keys()
        for key, values in wanted["history"].items():
            numpy.testing.assert_allclose(found["history"][key], values, rtol=2e-6)
        numpy.testing.assert_allclose(found["kernel"], wanted["kernel"], rtol=2e-6)
        numpy.testing.assert_allclose(found["bias"], wanted["bias"], rtol=2e-6)


def test_keras2_gradients_are_summed():
    def replica() -> list[float]:
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            w = mpidist.Variable(numpy.ones(1, "float32"))
            optimizer = mpidist.optimizers.SGD(0.5)
        gradient = numpy.full(1, strategy.extended.replica_id + 1, "float32")
        strategy.run(lambda: optimizer.apply_gradients([(gradient, w)], skip_gradients_aggregation=False))
        return w.numpy().tolist()

    assert run_ranks(2, replica) == expected("keras2_skip_aggregation_False")


def test_the_parameter_server_strategy_of_old_takes_its_cluster_from_the_environment():
    strategy = mpidist.experimental.ParameterServerStrategy()
    config = tf_estimator.RunConfig(train_distribute=strategy)
    wanted = expected("v1_ps_strategy_default_resolver")
    found = {
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
        "is_chief": config.is_chief,
        "worker_devices": len(strategy.extended.worker_devices),
    }
    assert_value(found, {name: wanted[name] for name in ("num_replicas_in_sync", "is_chief")} | {"worker_devices": 1})


TESTED = {
    "runconfig_default",
    *CONFIGS,
    *REFUSED,
    "runconfig_mwms_cluster_no_chief",
    "evalspec_defaults",
    "estimator_linear_n2",
    "estimator_custom_n2",
    "estimator_steps_vs_max_steps",
    "estimator_two_strategy_names",
    "keras2_fit_n0",
    "keras2_fit_n4",
    "keras2_skip_aggregation_False",
    "v1_ps_strategy_default_resolver",
}


def test_all_cases_are_tested_or_differ_on_purpose():
    assert TESTED | (DEVIATIONS.keys() & CASES.keys()) == set(CASES)
