"""A list of variables that was pushed before is pushed again without a look at each: the same steps and errors."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.optimizers import SGD
from tests.unit.parameter_server.jobs import one_worker


def trained(strategy, steps, **options):
    """Return two variables after some steps, each a list of gradients."""
    with strategy.scope():
        variables = [mpidist.Variable(numpy.zeros(shape, "float32")) for shape in [(2,), (2, 2)]]
        optimizer = SGD(1.0, **options)
    for gradients in steps:
        strategy.run(lambda gradients=gradients: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
    return [variable.value.tolist() for variable in variables], optimizer.iterations


GRADIENTS = [numpy.array([3.0, -4.0], "f4"), numpy.ones((2, 2), "f4")]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"global_clipnorm": 1.0}, {"clipnorm": 2.0}, {"clipvalue": 2.0}, {"gradient_accumulation_steps": 2}]
    + [{"loss_scale_factor": 4.0}, {"skip_nonfinite": True}, {"momentum": 0.5}],
)
def test_every_step_is_that_of_the_first(servers, options):
    expected = trained(mpidist.get_strategy(), [GRADIENTS] * 4, **options)
    found = one_worker(lambda strategy: trained(strategy, [GRADIENTS] * 4, **options), servers)
    assert found[1] == expected[1]
    for got, value in zip(found[0], expected[0], strict=True):
        numpy.testing.assert_allclose(got, value, rtol=1e-6)


def test_gradients_of_other_kinds_come_in_between():
    dense = numpy.ones((2, 2), "f4")
    rows = mpidist.IndexedSlices(numpy.ones((1, 2), "f4"), numpy.array([1]), (2, 2))
    whole = numpy.zeros(2, "f4")
    steps = [[whole, dense], [whole, rows], [whole.astype("f8"), dense.astype("f8")], [whole.tolist(), dense.tolist()]]
    (_, table), steps_made = one_worker(lambda strategy: trained(strategy, steps))
    assert (table, steps_made) == ([[-3.0, -3.0], [-4.0, -4.0]], 4)


def test_a_wrong_shape_and_a_missing_gradient_are_still_noticed():
    def work(strategy):
        with pytest.raises(ValueError, match=r"shape \(3,\)"):
            trained(strategy, [GRADIENTS, [numpy.ones(3, "f4"), GRADIENTS[1]]])
        with pytest.warns(UserWarning, match="gradients are None"):
            values, _ = trained(strategy, [GRADIENTS, [None, GRADIENTS[1]]])
        return values

    assert one_worker(work) == [[-3.0, 4.0], [[-2.0, -2.0], [-2.0, -2.0]]]


def test_what_is_no_pair_is_a_type_error_also_later():
    def work(strategy):
        with strategy.scope():
            variable, optimizer = mpidist.Variable(numpy.zeros(2, "f4")), SGD(1.0)
        strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(2, "f4"), variable)]))
        for wrong in ([variable], [(variable,)], [(numpy.ones(2, "f4"), 3)]):
            with pytest.raises(TypeError, match="takes pairs"):
                strategy.run(lambda wrong=wrong: optimizer.apply_gradients(wrong))
        return variable.value.tolist()

    assert one_worker(work) == [-1.0, -1.0]


def test_tensors_alike_but_for_their_first_axis_are_checked_as_they_are_packed():
    def work(strategy):
        with strategy.scope():
            variables = [mpidist.Variable(numpy.zeros((rows, 2), "float32")) for rows in (2, 1, 3)]
            optimizer = SGD(1.0)

        def push(*gradients):
            strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))

        def ones(*lengths, dtype="f4"):
            return [numpy.ones((rows, 2), dtype) for rows in lengths]

        for _ in range(3):
            push(*ones(2, 1, 3))
        for lengths in [(1, 2, 3), (2, 1, 4), (3, 3, 0)]:
            with pytest.raises(ValueError, match="shape"):
                push(*ones(*lengths))
        with pytest.raises(ValueError, match="shape"):
            push(*(numpy.ones((rows, 3), "f4") for rows in (2, 1, 3)))
        push(*ones(2, 1, 3, dtype="f8"))
        push(*(each.tolist() for each in ones(2, 1, 3)))
        push(*ones(2, 1), mpidist.IndexedSlices(numpy.ones((1, 2), "f4"), numpy.array([1]), (3, 2)))
        push(*ones(2, 1, 3))
        with pytest.raises(TypeError):
            optimizer.apply_gradients(
                [(each, variable, 1) for each, variable in zip(ones(2, 1, 3), variables, strict=True)]
            )
        return [variable.value[:, 0].tolist() for variable in variables], optimizer.iterations

    assert one_worker(work) == ([[-7.0] * 2, [-7.0], [-6.0, -7.0, -6.0]], 7)
