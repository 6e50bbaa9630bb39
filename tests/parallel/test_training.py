"""The main job's models on the ranks of an mpirun: N ranks equal one rank on the global batch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest

import mpidist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train  # noqa: E402

pytestmark = pytest.mark.mpi


def trained(strategy, *options: str) -> train.Training:
    """Return the training after its first epoch, or as many steps as the options say."""
    training = train.Training(train.parse_arguments(options), strategy)
    training.train_epoch()
    return training


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("batch_size", [64, 50, 3])
def test_parameters_equal_those_of_one_rank_to_rounding(model, batch_size):
    options = ("--model", model, "--batch-size", str(batch_size), "--steps", "20")
    together = trained(mpidist.MultiWorkerMirroredStrategy(), *options)
    alone = trained(mpidist.OneDeviceStrategy("/cpu:0"), *options)
    assert together.optimizer.iterations == alone.optimizer.iterations == 20
    for ours, expected in zip(together.parameters(), alone.parameters(), strict=True):
        numpy.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_all_ranks_hold_the_same_bits_and_agree_on_the_accuracy(model):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    training = trained(strategy, "--model", model, "--steps", "5")
    flat = numpy.concatenate([parameter.reshape(-1) for parameter in training.parameters()]).view("uint32")
    copies = strategy.gather(flat[None], axis=0)
    assert (copies == copies[0]).all()
    accuracies = strategy.gather(numpy.array([training.test_accuracy()]), axis=0)
    assert len(set(accuracies.tolist())) == 1


@pytest.mark.mpi(min_size=2)
def test_cnn_reaches_its_accuracy():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    if strategy.num_replicas_in_sync != 2:
        pytest.skip("2 ranks are enough to show it: the parameters are those of any other number")
    accuracies = []
    for split in range(3):
        arguments = train.parse_arguments(["--split", str(split)])
        training = train.Training(arguments, strategy)
        while training.batches.epoch < arguments.epochs:
            training.train_epoch()
        accuracies.append(training.test_accuracy())
    assert sum(accuracies) / 3 >= 0.985
