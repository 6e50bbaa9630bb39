"""`Estimator` in whole jobs: parameter servers and an evaluator from one script, and ranks that are killed."""

from __future__ import annotations

import json
import re

import numpy
import pytest

from tests.helpers.grid import grid
from tests.jobs import ROOT, run_job
from tests.unit.training import estimator_net as net
from tests.unit.training.softplus_net import loss

SERVED = """
import sys
import mpidist
from mpidist import estimator
from tests.unit.training import estimator_net as net

folder, max_steps, save_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ranks_per_worker = int(sys.argv[4]) if len(sys.argv) > 4 else 1
strategy = mpidist.ParameterServerStrategy(ranks_per_worker=ranks_per_worker)
config = estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=save_steps)
print("TASK", config.task_type, config.task_id, config.is_chief, config.has_evaluator, flush=True)
found = estimator.Estimator(net.model_fn, folder, config)
results, exports = estimator.train_and_evaluate(
    found,
    estimator.TrainSpec(net.input_fn_of(4, repeats=True), max_steps=max_steps),
    estimator.EvalSpec(net.input_fn_of(4), steps=None, start_delay_secs=0, throttle_secs=0),
)
print("RESULTS", config.task_type, results, flush=True)
"""


def served(tmp_path, ranks, roles, *arguments):
    """Run a job with servers; return by task type the tasks and the results that it printed."""
    found = run_job(ranks, SERVED, [str(tmp_path), *map(str, arguments)], env={"MPIDIST_ROLES": roles})
    assert found.returncode == 0, found.stderr
    tasks = sorted(re.findall(r"TASK (.*)", found.stdout))
    results = {task: text for task, text in re.findall(r"RESULTS (\w+) (.*)", found.stdout)}
    return tasks, results


def steps_evaluated(tmp_path):
    lines = (tmp_path / "eval" / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_one_worker_with_servers_does_what_one_process_does(tmp_path):
    tasks, results = served(tmp_path, 3, "chief:1,ps:2", 6, 100)
    assert tasks == ["chief 0 True False"]
    rows = numpy.arange(24) % net.ROWS
    expected = net.by_hand([rows[4 * step : 4 * step + 4] for step in range(6)])
    (evaluated,) = steps_evaluated(tmp_path)
    assert evaluated["global_step"] == 6
    numpy.testing.assert_allclose(evaluated["loss"], loss(expected, net.X, net.Y), rtol=1e-12)
    assert str(evaluated["loss"]) in results["chief"]
    # the same checkpoint goes on without servers
    alone = net.of(tmp_path)
    alone.train(net.input_fn_of(4), steps=1)
    after = net.by_hand([*(rows[4 * step : 4 * step + 4] for step in range(6)), slice(0, 4)])
    net.assert_same(net.values(alone), after)
    assert alone.get_variable_value("global_step") == 7


@pytest.mark.parametrize(
    ("ranks", "roles"), grid([(5, "chief:1,worker:2,ps:1,evaluator:1")], [(6, "chief:1,worker:2,ps:2,evaluator:1")])
)
def test_workers_share_the_steps_and_the_evaluator_sees_the_last_checkpoint(tmp_path, ranks, roles):
    tasks, results = served(tmp_path, ranks, roles, 60, 20)
    assert tasks == [
        "chief 0 True True",
        "evaluator 0 False True",
        "worker 0 False True",
        "worker 1 False True",
    ]
    assert results["chief"] == results["worker"] == "None"
    evaluated = steps_evaluated(tmp_path)
    steps = [each["global_step"] for each in evaluated]
    assert steps == sorted(set(steps))
    # each of the other workers finishes the step that it is at
    assert 60 <= steps[-1] <= 62
    newest = net.of(tmp_path)
    assert newest.get_variable_value("global_step") == steps[-1]
    numpy.testing.assert_allclose(evaluated[-1]["loss"], loss(net.values(newest), net.X, net.Y), rtol=1e-12)
    assert evaluated[-1]["loss"] < loss(net.initial(), net.X, net.Y)
    assert str(evaluated[-1]["loss"]) in results["evaluator"]


def test_a_job_with_servers_goes_on_with_its_steps_and_other_ranks(tmp_path):
    served(tmp_path, 2, "chief:1,ps:1", 5, 100)
    served(tmp_path, 3, "chief:1,worker:1,ps:1", 9, 100)
    steps = [each["global_step"] for each in steps_evaluated(tmp_path)]
    assert steps[0] == 5 and 9 <= steps[1] <= 10


TWICE = """
import sys
import mpidist
from mpidist import estimator
from tests.unit.training import estimator_net as net

strategy = mpidist.ParameterServerStrategy()
found = estimator.Estimator(net.model_fn, sys.argv[1], estimator.RunConfig(train_distribute=strategy))
found.train(net.input_fn_of(2, repeats=True), steps=10)
found.train(net.input_fn_of(2, repeats=True), steps=10)
if strategy.extended.is_chief:
    step = found.get_variable_value("global_step")
    assert 20 <= step <= 24, step  # other workers finish the step that they are at, in both calls
    results = found.evaluate(net.input_fn_of(4))
    assert results["global_step"] == step
    predicted = list(found.predict(net.input_fn_of(4)))
    print("DONE", len(predicted), flush=True)
"""


def test_workers_train_twice_and_the_chief_evaluates_by_itself(tmp_path):
    found = run_job(4, TWICE, [str(tmp_path)], env={"MPIDIST_ROLES": "chief:1,worker:2,ps:1"})
    assert found.returncode == 0, found.stderr
    assert re.findall(r"DONE (\d+)", found.stdout) == [str(net.ROWS)]


def test_workers_of_two_ranks(tmp_path):
    served(tmp_path, 5, "worker:4,ps:1", 20, 100, 2)
    (evaluated,) = steps_evaluated(tmp_path)
    assert 20 <= evaluated["global_step"] <= 21


KILLED = """
import os
import signal
import sys
import mpidist
from mpidist import estimator
from tests.unit.training import estimator_net as net

folder, name, killed_at, batch_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
strategy = getattr(mpidist, name)()


class Kill(estimator.SessionRunHook):
    def after_run(self, run_context, run_values):
        if run_context.session.global_step == killed_at and strategy.extended.replica_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)


config = estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=2)
found = estimator.Estimator(net.model_fn, folder, config)
found.train(net.input_fn_of(batch_size), hooks=[Kill()])
print("STEPS", found.get_variable_value("global_step"), flush=True)
"""


@pytest.mark.parametrize("name", ["MirroredStrategy", "MultiWorkerMirroredStrategy"])
def test_a_killed_job_goes_on_from_its_folder_on_other_ranks(tmp_path, name):
    killed = run_job(2, KILLED, [str(tmp_path), name, "3", "2"])
    assert killed.returncode != 0 and "STEPS" not in killed.stdout
    assert [path.name for path in tmp_path.glob("checkpoint-*.h5")] == ["checkpoint-2.h5"]
    resumed = run_job(4, KILLED, [str(tmp_path), name, "-1", "1"])
    assert resumed.returncode == 0, resumed.stderr
    steps = net.cut(4)  # the global batch is 4 rows on either number of ranks
    assert re.findall(r"STEPS (\d+)", resumed.stdout) == [str(len(steps))] * 4
    net.assert_same(net.values(net.of(tmp_path)), net.by_hand(steps))


EXAMPLE = ROOT / "examples" / "estimator_linear.py"


def test_the_example_prints_the_same_on_any_number_of_ranks():
    printed = set()
    for ranks, name in ((1, "MirroredStrategy"), (2, "MirroredStrategy"), (3, "MultiWorkerMirroredStrategy")):
        found = run_job(ranks, EXAMPLE, ["--strategy", name])
        assert found.returncode == 0, found.stderr
        printed.add(found.stdout)
    ((step, accuracy),) = re.findall(r"step (\d+), test loss [0-9.]+, accuracy ([0-9.]+)\n", printed.pop())
    assert (step, printed) == ("200", set())
    assert float(accuracy) > 0.9


def test_the_example_with_servers_and_an_evaluator(tmp_path):
    options = ["--strategy", "ParameterServerStrategy", "--model-dir", str(tmp_path)]
    found = run_job(4, EXAMPLE, options, env={"MPIDIST_ROLES": "chief:1,worker:1,ps:1,evaluator:1"})
    assert found.returncode == 0, found.stderr
    ((step, accuracy),) = re.findall(r"step (\d+), test loss [0-9.]+, accuracy ([0-9.]+)\n", found.stdout)
    assert 200 <= int(step) <= 201 and float(accuracy) > 0.85
