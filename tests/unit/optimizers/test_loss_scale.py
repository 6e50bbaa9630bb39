"""Loss scales, and steps that are left out because a summed gradient is not finite."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist import optimizers
from mpidist.optimizers.loss_scale import LossScale
from mpidist.testing import run_ranks
from mpidist.variables import IndexedSlices, Variable


def test_a_fixed_scale_keeps_small_gradients():
    optimizer = optimizers.SGD(1.0, loss_scale_factor=1024.0)
    v = Variable(numpy.ones(1, "float16"))
    gradient = numpy.float32(2.0**-26)  # 0 in float16
    assert numpy.float16(gradient) == 0
    optimizer.apply_gradients([(optimizer.scale_loss(gradient).astype("float16").reshape(1), v)])
    wide = Variable(numpy.zeros(1, "float32"))
    optimizer.apply_gradients([(numpy.array([2.0**-16], "float32"), wide)])
    assert wide.value.tolist() == [-(2.0**-26)]
    assert optimizer.elementwise and optimizer.scale_loss(3.0) == 3072.0


def test_without_a_scale_losses_stay():
    assert optimizers.SGD(1.0).scale_loss(3.0) == 3.0


def test_a_dynamic_scale_grows_and_shrinks():
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=2)
    v, scales = Variable(numpy.zeros(2)), []
    for bad in (False, False, False, True, False, False, True, True):
        gradient = numpy.array([numpy.inf if bad else optimizer.loss_scale.scale, 0.0])
        optimizer.apply_gradients([(gradient, v)])
        scales.append(optimizer.loss_scale.scale)
    assert scales == [8, 16, 16, 8, 8, 16, 8, 4]
    assert (optimizer.iterations, optimizer.skipped_steps) == (5, 3)
    assert v.value.tolist() == [-5.0, 0.0]


def test_a_dynamic_scale_needs_steps_to_grow():
    with pytest.raises(TypeError, match="dynamic_growth_steps must be a number of steps, got None; a fixed scale is"):
        optimizers.LossScaleOptimizer(optimizers.SGD(1.0), dynamic_growth_steps=None)
    with pytest.raises(ValueError, match="the loss scale grows after 1 step or more, got 0"):
        optimizers.LossScaleOptimizer(optimizers.SGD(1.0), dynamic_growth_steps=0)


def test_a_dynamic_scale_stays_from_one_to_what_float32_holds():
    scale = LossScale(2.0, growth_steps=1)
    for _ in range(5):
        scale.note(is_left_out=True)
    assert scale.scale == 1
    for _ in range(300):
        scale.note(is_left_out=False)
    assert numpy.isfinite(numpy.float32(scale.scale))


def test_a_dynamic_scale_is_part_of_the_state():
    first = optimizers.LossScaleOptimizer(optimizers.Adam(1.0), 8.0, 2)
    v = Variable(numpy.zeros(1))
    for gradient in (1.0, numpy.nan, 1.0):
        first.apply_gradients([([gradient], v)])
    second = optimizers.LossScaleOptimizer(optimizers.Adam(1.0), 8.0, 2)
    second.restore({key: numpy.array(x) if hasattr(x, "dtype") else x for key, x in first.state().items()})
    assert (second.loss_scale.scale, second.iterations, second.skipped_steps) == (4.0, 2, 1)
    for optimizer in (first, second):
        optimizer.apply_gradients([([1.0], v)])
        assert optimizer.loss_scale.scale == 8.0


@pytest.mark.parametrize("family", [optimizers.SGD, optimizers.Adam, optimizers.LAMB])
@pytest.mark.parametrize("bad", [numpy.inf, -numpy.inf, numpy.nan])
def test_a_skipped_step_changes_nothing(family, bad):
    optimizer, v, w = family(0.1, skip_nonfinite=True), Variable(numpy.ones(3)), Variable(numpy.ones(1))
    optimizer.apply_gradients([(numpy.ones(3), v), (numpy.ones(1), w)])
    before = [v.value.tolist(), w.value.tolist(), [slot.tolist() for slot in optimizer.slots(v).values()]]
    optimizer.apply_gradients([(numpy.array([1.0, bad, 1.0]), v), (numpy.ones(1), w)])
    assert [v.value.tolist(), w.value.tolist(), [slot.tolist() for slot in optimizer.slots(v).values()]] == before
    assert (optimizer.iterations, optimizer.skipped_steps) == (1, 1)
    optimizer.apply_gradients([(IndexedSlices(numpy.array([bad]), numpy.array([0])), w)])
    assert (optimizer.iterations, optimizer.skipped_steps, w.value.tolist()) == (1, 2, before[1])


def test_without_being_asked_a_bad_gradient_is_applied():
    optimizer, v = optimizers.SGD(1.0), Variable(numpy.ones(1))
    optimizer.apply_gradients([([numpy.nan], v)])
    assert numpy.isnan(v.value).all() and optimizer.iterations == 1


@pytest.mark.parametrize("who", ["one", "together"])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_all_ranks_skip_together_without_a_call_more(who):
    def train():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync
        with strategy.scope():
            v = Variable(numpy.zeros(2, "float32"))
        optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(1.0), 4.0)
        control = strategy.extended.communicator.control
        calls = []
        for step in range(3):
            bad = numpy.nan if who == "one" else numpy.float32(3e38)  # finite parts, and an infinite sum
            is_bad = step == 1 and (rank == 1 or who == "together")
            gradient = numpy.array([bad if is_bad else 4.0, 4.0 / size], "float32")
            before = control.call
            strategy.run(lambda g=gradient: optimizer.apply_gradients([(g, v)]))
            calls.append(control.call - before)
        return v.value.tolist(), optimizer.iterations, optimizer.skipped_steps, optimizer.loss_scale.scale, calls[2]

    # after the step that is left out the scale is 2: gradients of 4 count twice
    assert run_ranks(3, train) == [([-9.0, pytest.approx(-1.0 - 2.0)], 2, 1, 2.0, 1)] * 3


def test_wrong_arguments():
    for scale in (0.0, -1.0, numpy.inf):
        with pytest.raises(ValueError, match="a loss scale must be positive and finite"):
            LossScale(scale)
    with pytest.raises(ValueError, match="grows after 1 step or more, got 0"):
        optimizers.LossScaleOptimizer(optimizers.SGD(1.0), 8.0, 0)


def test_only_an_optimizer_gets_a_loss_scale():
    with pytest.raises(TypeError, match="takes an optimizer"):
        optimizers.LossScaleOptimizer(0.1)


def test_leaving_steps_out_can_be_switched_on_later():
    variable, optimizer = mpidist.Variable(numpy.zeros(2)), optimizers.SGD(1.0)
    optimizer.skip_nonfinite = True
    optimizer.apply_gradients([(numpy.array([numpy.inf, 1.0]), variable)])
    assert (variable.numpy().tolist(), optimizer.skipped_steps) == ([0.0, 0.0], 1)
