"""``examples/mesh.py``: split layers learn what one rank with whole layers learns."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest

from mpidist.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import mesh  # noqa: E402


@pytest.mark.parametrize(("size", "devices"), [(2, 1), (2, 2), (4, 2), (3, 1), (8, 4)])
def test_any_mesh_learns_the_same(size, devices):
    expected, layers = mesh.train(1, 3)
    assert expected[2] < expected[0] / 2

    def fn():
        losses, split = mesh.train(devices, 3)
        assert split.kernel.shape == (mesh.INPUTS, mesh.HIDDEN // devices)
        return losses, split.kernel.saved_value().copy(), split.output.saved_value().copy()

    for losses, kernel, output in run_ranks(size, fn):
        numpy.testing.assert_allclose(losses, expected, rtol=1e-12)
        numpy.testing.assert_allclose(kernel, layers.kernel.value, rtol=1e-10)
        numpy.testing.assert_allclose(output, layers.output.value, rtol=1e-10)


def test_gradients_are_the_slopes_of_the_loss():
    def fn():
        strategy = mesh.make_strategy(2)
        with strategy.scope():
            layers = mesh.SplitLayers(2)
        rows, targets = (part[:5] for part in mesh.examples())

        def slope(variable, gradient):
            base, step = variable.storage[..., :1].copy(), 1e-6
            losses = []
            for sign in (1, -1):
                # the loss is that of the whole replica: only logical device 0 moves
                moved = base + sign * step * (strategy.extended.logical_device == 0)
                variable.storage[..., :1] = moved
                losses.append(layers.loss_and_gradients(rows, targets, 5)[0])
            variable.storage[..., :1] = base
            return (losses[0] - losses[1]) / (2 * step), gradient[..., :1].sum()

        _, pairs = strategy.run(lambda: layers.loss_and_gradients(rows, targets, 5))
        return [strategy.run(slope, (variable, gradient)) for gradient, variable in pairs]

    for measured, computed in run_ranks(2, fn)[0]:
        assert measured == pytest.approx(computed, rel=1e-6)


def test_what_it_prints(capsys):
    run_ranks(2, mesh.main, ["--epochs", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["replicas: 1, each of 2 ranks", "hidden/kernel: (8, 32) of (8, 64) on each rank"]
    assert lines[2].startswith("loss ") and lines[2].endswith("in epoch 2")


def test_ranks_that_make_up_no_whole_replica():
    with pytest.raises(ValueError, match=r"ranks \[2\] belong to no replica.*another number of ranks"):
        run_ranks(3, mesh.train, 2, 2)


def test_a_wrong_number_of_ranks_is_told_once_and_without_a_traceback(capsys):
    def refused():
        with pytest.raises(SystemExit) as left:
            mesh.main(["--epochs", "2"])
        return left.value.code

    assert run_ranks(3, refused) == [2, 2, 2]
    told = capsys.readouterr().err
    assert told.startswith("mesh.py: 3 ranks are not a whole number of replicas of 2 ranks each: start 2, 4, ... ranks")
    assert told.count("\n") == 1
