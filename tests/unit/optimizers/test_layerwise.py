"""LARS and LAMB against the rules of their papers, and the norms they rest on."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import optimizers
from mpidist.optimizers.slices import SLICE_ELEMENTS
from mpidist.variables import Variable


def norm(x):
    return numpy.sqrt((x * x).sum())


def reference_lars(p, gradients, rate, momentum, trust, decay):
    velocity = numpy.zeros_like(p)
    for g in gradients:
        local = trust * norm(p) / (norm(g) + decay * norm(p)) if norm(p) and norm(g) else 1
        velocity = momentum * velocity + rate * local * (g + decay * p)
        p = p - velocity
    return p


def reference_lamb(p, gradients, rate, beta_1, beta_2, epsilon, decay):
    m, v = numpy.zeros_like(p), numpy.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m, v = beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g * g
        step = m / (1 - beta_1**t) / (numpy.sqrt(v / (1 - beta_2**t)) + epsilon) + decay * p
        ratio = norm(p) / norm(step) if norm(p) and norm(step) else 1
        p = p - rate * ratio * step
    return p


def trained(optimizer, start, gradients):
    v = Variable(start, name="kernel")
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, v)])
    return v.value


@given(st.integers(0, 1000), st.integers(1, 6), st.sampled_from([0.0, 0.01]))
def test_rules_of_the_papers(seed, count, decay):
    random = numpy.random.default_rng(seed)
    start, gradients = random.normal(size=(3, 2)), random.normal(size=(count, 3, 2))
    found = trained(optimizers.LARS(0.1, 0.8, 0.02, decay), start, gradients)
    numpy.testing.assert_allclose(found, reference_lars(start, gradients, 0.1, 0.8, 0.02, decay), rtol=1e-9)
    found = trained(optimizers.LAMB(0.1, 0.8, 0.95, 1e-3, decay), start, gradients)
    numpy.testing.assert_allclose(found, reference_lamb(start, gradients, 0.1, 0.8, 0.95, 1e-3, decay), rtol=1e-9)


def test_variables_of_many_slices_have_one_norm():
    random = numpy.random.default_rng(3)
    start, gradients = random.normal(size=2 * SLICE_ELEMENTS + 5), random.normal(size=(2, 2 * SLICE_ELEMENTS + 5))
    found = trained(optimizers.LAMB(0.1, 0.8, 0.95, 1e-3, 0.01), start, gradients)
    numpy.testing.assert_allclose(found, reference_lamb(start, gradients, 0.1, 0.8, 0.95, 1e-3, 0.01), rtol=1e-9)
    found = trained(optimizers.LARS(0.1, 0.8, 0.02, 0.01), start, gradients)
    numpy.testing.assert_allclose(found, reference_lars(start, gradients, 0.1, 0.8, 0.02, 0.01), rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_step_of_lamb_is_as_long_as_learning_rate_times_parameter(scale):
    start, gradient = numpy.arange(1.0, 7), scale * numpy.array([1.0, -2, 3, -4, 5, -6])
    found = trained(optimizers.LAMB(0.1, epsilon=0.0), start, [gradient])
    assert norm(found - start) == pytest.approx(0.1 * norm(start), rel=1e-12)


@pytest.mark.parametrize("make", [optimizers.LARS, optimizers.LAMB])
def test_zeros_are_updated_without_a_ratio(make):
    found = trained(make(0.1), numpy.zeros(3), [numpy.ones(3)])
    assert numpy.isfinite(found).all() and (found < 0).all()
    assert (trained(make(0.1, weight_decay=0.0), numpy.ones(3), [numpy.zeros(3)]) == 1).all()


def test_excluded_variables_are_updated_without_a_ratio():
    optimizer = optimizers.LARS(0.1, 0.0, weight_decay=0.0, exclude_from_layer_adaptation=["bias"])
    kernel, bias = (Variable(numpy.full(4, 2.0), name=name) for name in ("kernel", "bias"))
    optimizer.apply_gradients([(numpy.ones(4), kernel), (numpy.ones(4), bias)])
    numpy.testing.assert_allclose(bias.value, 2 - 0.1)
    numpy.testing.assert_allclose(kernel.value, 2 - 0.1 * 0.001 * 4 / 2)


@pytest.mark.parametrize("make", [optimizers.LARS, optimizers.LAMB])
def test_a_text_is_no_list_of_excluded_names(make):
    with pytest.raises(TypeError, match="exclude_from_layer_adaptation takes a list of .* got the text 'bias'"):
        make(0.1, exclude_from_layer_adaptation="bias")
