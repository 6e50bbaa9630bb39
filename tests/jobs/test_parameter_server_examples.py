"""The examples of parameter servers, as jobs: they learn what the same model learns without servers."""

from __future__ import annotations

import re
import sys

import pytest

from tests.helpers.grid import grid
from tests.jobs import ROOT, environment, run_job, run_process

EXAMPLES = ROOT / "examples"

#: The same model and schedule as ``parameter_server.py``, on copies that are updated together.
MIRRORED = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import digits, mlp, mpidist
train, test = digits.load()
steps = 30 * (len(train.images) // 64)
strategy = mpidist.MirroredStrategy()
with strategy.scope():
    variables = [mpidist.Variable(value, name=name) for name, value in mlp.initial(seed=0).items()]
    optimizer = mpidist.optimizers.Adam(mpidist.optimizers.schedules.CosineDecay(0.004, steps))

def value_and_grad(parameters, images, labels):
    return mlp.value_and_grad(parameters, images, labels, len(images))

trainer = mpidist.Trainer(value_and_grad, variables, optimizer, metrics=["accuracy"], predict_fn=mlp.logits)
data = mpidist.data.Dataset.from_arrays(tuple(train)).shuffle(seed=0).batch(64).repeat()
trainer.fit(data, epochs=1, steps_per_epoch=steps, verbose=0)
loss, accuracy = trainer.evaluate(test.images, test.labels, batch_size=len(test.images))
if trainer.is_chief:
    print(f"test accuracy {{accuracy:.4f}}")
"""


@pytest.fixture(scope="module")
def mirrored() -> float:
    """The accuracy of the run without servers."""
    result = run_job(2, MIRRORED)
    assert result.returncode == 0, result.stderr
    return accuracy(result.stdout)


def accuracy(printed: str) -> float:
    return float(re.search(r"test accuracy ([0-9.]+)", printed)[1])


@pytest.mark.parametrize(
    ("ranks", "options"),
    grid(
        [(4, ()), (8, ("--style", "between-graph", "--num-ps", "3"))],
        [(6, ("--num-ps", "2")), (3, ("--style", "between-graph"))],
    ),
)
def test_digits_come_within_one_per_cent_of_the_mirrored_run(ranks, options, mirrored, tmp_path):
    saved = tmp_path / "model.h5"
    result = run_job(ranks, EXAMPLES / "parameter_server.py", (*options, "--checkpoint", str(saved)))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("test accuracy") == 1, "the chief prints, and nobody else"
    assert accuracy(result.stdout) >= mirrored - 0.01
    assert saved.exists()


@pytest.mark.parametrize("style", ["coordinator", "between-graph"])
def test_digits_without_a_launcher(style, mirrored):
    result = run_process(
        [sys.executable, str(EXAMPLES / "parameter_server.py"), "--style", style], environment(), timeout_seconds=300
    )
    assert result.returncode == 0, result.stderr
    assert accuracy(result.stdout) >= mirrored - 0.01


@pytest.mark.parametrize(
    ("ranks", "options", "roles", "servers"),
    grid([(5, (), {"MPIDIST_ROLES": "chief:1,worker:2,ps:2"}, 2)], [(5, ("--num-ps", "2"), {}, 2), (4, (), {}, 1)]),
)
def test_the_recommender_learns_from_rows_of_sharded_tables(ranks, options, roles, servers):
    result = run_job(ranks, EXAMPLES / "recommender.py", options, env=roles)
    assert result.returncode == 0, result.stderr
    found = re.search(
        rf"{servers} shards, test error ([0-9.]+) stars, of the mean of all ratings ([0-9.]+)", result.stdout
    )
    error, guess = map(float, found.groups())
    # Noise and rounding alone are sqrt(0.5 ** 2 + 1 / 12) = 0.58 stars.
    assert error < 0.7 < guess
    assert "epoch 10: error" in result.stdout
