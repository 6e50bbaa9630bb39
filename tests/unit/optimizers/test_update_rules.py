"""The update rules against closed forms, on arrays of every length and dtype."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import optimizers
from mpidist.errors import UnsupportedDtypeError
from mpidist.optimizers.slices import SLICE_ELEMENTS
from mpidist.variables import IndexedSlices, Variable

FAMILIES = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.1),
    "adamw": lambda: optimizers.AdamW(0.1, weight_decay=0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.2, l2_shrinkage_regularization_strength=0.3),
    "rmsprop": lambda: optimizers.RMSprop(0.1),
    "rmsprop-all": lambda: optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "clipped": lambda: optimizers.SGD(0.1, momentum=0.9, clipvalue=0.7, weight_decay=0.1),
}
#: Families that look at a whole variable: an element's update depends on the others.
LAYERWISE = {
    "lars": lambda: optimizers.LARS(0.1, trust_coefficient=0.1),
    "lamb": lambda: optimizers.LAMB(0.1, weight_decay=0.01),
}
ALL = {**FAMILIES, **LAYERWISE}


def steps(optimizer, start, gradients):
    v = Variable(start)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, v)])
    return v


def test_sgd():
    v = steps(optimizers.SGD(0.5), numpy.array([1.0, 2.0]), [numpy.array([2.0, 0.0]), numpy.array([2.0, 4.0])])
    assert v.value.tolist() == [-1.0, 0.0]


@given(st.integers(1, 30), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_momentum_sums_a_geometric_series(count, momentum):
    v = steps(optimizers.SGD(1.0, momentum=momentum), numpy.zeros(3), [numpy.ones(3)] * count)
    expected = -sum((count - k) * momentum**k for k in range(count))
    numpy.testing.assert_allclose(v.value, expected, rtol=1e-12)


def test_nesterov_looks_one_step_ahead():
    v = steps(optimizers.SGD(1.0, momentum=0.5, nesterov=True), numpy.zeros(1), [numpy.ones(1)] * 2)
    # velocities -1 and -1.5; each step is momentum * velocity - gradient
    assert v.value.tolist() == [-1.5 - 1.75]


@given(st.integers(1, 20), st.floats(-1e3, 1e3).filter(lambda g: abs(g) > 1e-2))
def test_adam_steps_by_the_learning_rate_while_the_gradient_stays_the_same(count, gradient):
    v = steps(optimizers.Adam(0.1, epsilon=0.0), numpy.zeros(2), [numpy.full(2, gradient)] * count)
    numpy.testing.assert_allclose(v.value, -0.1 * count * math.copysign(1, gradient), rtol=1e-9)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12))
def test_adam_is_the_published_rule(gradients):
    v = steps(optimizers.Adam(0.1, 0.8, 0.95, 1e-3), numpy.zeros(1), [numpy.array([g]) for g in gradients])
    p = 0.0
    for t in range(1, len(gradients) + 1):
        m = sum(0.2 * 0.8 ** (t - k) * gradients[k - 1] for k in range(1, t + 1))
        s = sum(0.05 * 0.95 ** (t - k) * gradients[k - 1] ** 2 for k in range(1, t + 1))
        p -= 0.1 * math.sqrt(1 - 0.95**t) / (1 - 0.8**t) * m / (math.sqrt(s) + 1e-3)
    numpy.testing.assert_allclose(v.value, [p], rtol=1e-9, atol=1e-12)


def test_adamw_decays_the_weights_apart_from_the_gradient():
    v = steps(optimizers.AdamW(0.1, weight_decay=0.5), numpy.array([4.0]), [numpy.zeros(1)] * 3)
    numpy.testing.assert_allclose(v.value, 4 * 0.95**3, rtol=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(0, 1))
def test_adagrad_is_the_published_rule(gradients, start):
    v = steps(optimizers.Adagrad(0.1, start, 1e-3), numpy.zeros(1), [numpy.array([g]) for g in gradients])
    sums = start + numpy.cumsum(numpy.square(gradients))
    numpy.testing.assert_allclose(v.value, -0.1 * (gradients / numpy.sqrt(sums + 1e-3)).sum(), rtol=1e-9, atol=1e-12)


@given(st.lists(st.floats(-10, 10).filter(lambda g: g == 0 or abs(g) > 1e-3), min_size=1, max_size=12), st.floats(0, 1))
def test_ftrl_without_penalties_steps_by_the_root_of_all_squares(gradients, start):
    v = steps(
        optimizers.Ftrl(0.1, initial_accumulator_value=start), numpy.zeros(1), [numpy.array([g]) for g in gradients]
    )
    roots = numpy.sqrt(start + numpy.cumsum(numpy.square(gradients)))
    expected = -0.1 * sum(g / root for g, root in zip(gradients, roots, strict=True) if g)
    numpy.testing.assert_allclose(v.value, [expected], rtol=1e-9, atol=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.sampled_from([-0.5, -0.3, 0.0]))
def test_ftrl_is_the_minimum_of_the_published_sum(gradients, power):
    """Of g w, the distances from earlier w, and the penalties; the derivative is 0 there, or is within l1 around 0."""
    rate, l1, l2, shrinkage, beta = 0.1, 0.3, 0.2, 0.05, 0.7
    optimizer = optimizers.Ftrl(rate, power, 0.4, l1, l2, shrinkage, beta)
    w, v = [0.5], Variable(numpy.array([0.5]))
    for gradient in gradients:
        optimizer.apply_gradients([(numpy.array([gradient]), v)])
        w.append(float(v.value[0]))
    roots = (0.4 + numpy.cumsum(numpy.square([0.0, *gradients]))) ** -power
    last, earlier = w[-1], numpy.array(w[:-1])
    slope = sum(gradients) + 2 * shrinkage * earlier.sum()
    slope += (numpy.diff(roots) / rate * (last - earlier)).sum() + (beta + roots[0]) / rate * last + 2 * l2 * last
    wanted = slope if last == 0 else -math.copysign(l1, last)
    numpy.testing.assert_allclose(slope, wanted, atol=1e-9)
    assert abs(slope) <= l1 + 1e-9


def test_ftrl_leaves_an_element_without_gradients_at_0():
    v = steps(
        optimizers.Ftrl(0.1, initial_accumulator_value=0.0), numpy.zeros(2, "f4"), [numpy.array([0, 1], "f4")] * 2
    )
    numpy.testing.assert_allclose(v.value, [0, -0.1 * (1 + 0.5**0.5)], rtol=1e-6)


def test_ftrl_refuses_a_learning_rate_of_0():
    optimizer, v = optimizers.Ftrl(lambda step: 0.1 if step == 0 else 0.0), Variable(numpy.zeros(1))
    optimizer.apply_gradients([(numpy.ones(1), v)])
    with pytest.raises(ValueError, match=r"above 0; got 0.0 after 1 steps"):
        optimizer.apply_gradients([(numpy.ones(1), v)])
    assert optimizer.iterations == 1


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_rmsprop_is_the_published_rule(gradients, centered, momentum):
    optimizer = optimizers.RMSprop(0.1, 0.8, momentum, 1e-3, centered)
    v = steps(optimizer, numpy.zeros(1), [numpy.array([g]) for g in gradients])
    p = running = 0.0
    for t in range(1, len(gradients) + 1):
        weights = 0.2 * 0.8 ** numpy.arange(t - 1, -1, -1)
        squares, mean = weights @ numpy.square(gradients[:t]), weights @ gradients[:t]
        running = momentum * running + 0.1 * gradients[t - 1] / math.sqrt(squares - centered * mean**2 + 1e-3)
        p -= running
    numpy.testing.assert_allclose(v.value, [p], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["sgd", "adam", "adagrad", "rmsprop"])
def test_every_family_decays_weights_when_asked(family):
    v = steps(type(FAMILIES[family]())(0.1, weight_decay=0.5), numpy.array([4.0]), [numpy.zeros(1)] * 3)
    numpy.testing.assert_allclose(v.value, 4 * 0.95**3, rtol=1e-12)


@pytest.mark.parametrize("family", ["adamw", "lars", "lamb"])
def test_variables_can_be_left_out_of_the_decay(family):
    def make():
        return {"adamw": optimizers.AdamW, **{"lars": optimizers.LARS, "lamb": optimizers.LAMB}}[family](
            0.1, weight_decay=0.5
        )

    optimizer, names = make(), ("kernel", "bias_1", "scale")
    kernel, bias, scale = (Variable(numpy.full(2, 4.0), name=name) for name in names)
    optimizer.exclude_from_weight_decay([scale], var_names=["^bias"])
    optimizer.apply_gradients([(numpy.zeros(2), v) for v in (kernel, bias, scale)])
    assert (bias.value == 4).all() and (scale.value == 4).all()
    assert (kernel.value < 4).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("elements", [0, 1, SLICE_ELEMENTS - 1, SLICE_ELEMENTS, 2 * SLICE_ELEMENTS + 3])
def test_every_length_is_updated_as_its_elements_alone(family, elements):
    random = numpy.random.default_rng(0)
    start, gradients = random.normal(size=elements), random.normal(size=(2, elements))
    whole = steps(FAMILIES[family](), start, gradients)
    picked = numpy.arange(0, elements, max(elements // 7, 1))
    alone = steps(FAMILIES[family](), start[picked], gradients[:, picked])
    assert whole.value[picked].tolist() == alone.value.tolist()
    assert elements == 0 or not (whole.value == start).any()


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32"])
def test_short_floats_are_computed_in_float32_and_rounded_once(family, dtype):
    start, gradient = numpy.array([1.0, -2.0, 0.5], dtype), numpy.array([0.25, 0.5, -1.0], dtype)
    short = steps(ALL[family](), start, [gradient])
    wide = steps(ALL[family](), start.astype("float32"), [gradient.astype("float32")])
    assert short.value.tolist() == wide.value.astype(dtype).tolist()


@pytest.mark.parametrize("family", ALL)
def test_dtypes_and_shapes_stay_and_gradients_are_not_changed(family):
    for dtype in ("float16", "float32", "float64"):
        for shape in ((), (2, 3), (0,)):
            v, gradient = Variable(numpy.ones(shape, dtype)), numpy.ones(shape, dtype)
            optimizer = ALL[family]()
            for _ in range(2):
                optimizer.apply_gradients([(gradient, v)])
            assert (v.value.dtype, v.value.shape) == (dtype, shape)
            assert (gradient == 1).all()
            assert all(slot.shape == shape for slot in optimizer.slots(v).values())


@pytest.mark.parametrize("family", ALL)
def test_updates_work_in_place(family):
    v = Variable(numpy.ones(5, "float32"))
    before = v.value
    ALL[family]().apply_gradients([(numpy.ones(5, "float32"), v)])
    assert before is v.value
    assert (before != 1).all()


def test_learning_rate_may_be_a_function_of_the_step():
    optimizer = optimizers.SGD(lambda step: 1.0 / (step + 1))
    v = steps(optimizer, numpy.zeros(1), [numpy.ones(1)] * 3)
    numpy.testing.assert_allclose(v.value, -(1 + 1 / 2 + 1 / 3), rtol=1e-12)
    assert (optimizer.iterations, optimizer.learning_rate) == (3, 0.25)
    with pytest.raises(TypeError, match="would replace the schedule"):  # as in Keras
        optimizer.learning_rate = 0.5
    assert optimizer.learning_rate == 0.25
    optimizer.learning_rate = lambda step: 0.5
    assert optimizer.learning_rate == 0.5


def test_gradients_that_are_none_are_left_out_with_a_warning():
    v, w = Variable([1.0], name="kept"), Variable([1.0], name="left_out")
    with pytest.warns(UserWarning, match="None for the variables .*left_out"):
        optimizers.SGD(1.0).apply_gradients([([1.0], v), (None, w)])
    assert (v.value.tolist(), w.value.tolist()) == ([0.0], [1.0])


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_no_gradient_at_all_is_refused(pairs):
    optimizer = optimizers.SGD(1.0)
    with pytest.raises(ValueError, match="no gradients provided"):
        optimizer.apply_gradients([(None, Variable([1.0]))] * pairs)
    assert optimizer.iterations == 0


def test_a_gradient_of_another_shape_is_refused():
    v = Variable(numpy.zeros((2, 3)), name="kernel")
    with pytest.raises(ValueError, match=r"'kernel\w*' has shape \(3,\), expected \(2, 3\)"):
        optimizers.SGD(1.0).apply_gradients([(numpy.ones(3), v)])


def test_gradients_are_cast_to_their_variables():
    v = Variable(numpy.zeros((2, 3), "float32"))
    optimizers.SGD(1.0).apply_gradients([(numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)), v)])
    assert v.value.tolist() == [[0, -1, -2], [-3, -4, -5]]
    assert v.value.dtype == "float32"


@pytest.mark.parametrize("family", ALL)
def test_state_goes_on_where_it_was(family):
    random = numpy.random.default_rng(1)
    gradients = random.normal(size=(6, 4))
    optimizer = ALL[family]()
    straight = steps(optimizer, numpy.zeros(4), gradients)

    first = ALL[family]()
    v = steps(first, numpy.zeros(4), gradients[:3])
    state = {key: numpy.array(value) for key, value in first.state().items()}
    second = ALL[family]()
    second.restore(state)
    assert second.state().keys() == state.keys()
    w = steps(second, numpy.array(v.value), gradients[3:])
    assert w.value.tolist() == straight.value.tolist()
    assert second.iterations == 6

    second.restore(state)
    restored = {key: value for key, value in second.state().items() if key != "slot_variables"}
    assert all((numpy.array(value) == state[key]).all() for key, value in restored.items())


def test_state_from_before_the_first_step_clears_the_slots():
    optimizer = ALL["momentum"]()
    state = dict(optimizer.state())
    v = steps(optimizer, numpy.zeros(2), [numpy.ones(2)])
    optimizer.restore(state)
    assert optimizer.iterations == 0
    assert optimizer.slots(v)["momentum"].tolist() == [0, 0]


def test_state_of_another_model_is_refused():
    optimizer = ALL["momentum"]()
    optimizer.restore({"iterations": 1, "0/momentum": numpy.zeros(3)})
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(2,\)"):
        optimizer.apply_gradients([(numpy.ones(2), Variable(numpy.zeros(2)))])


@pytest.mark.parametrize("family", [optimizers.SGD, optimizers.RMSprop, optimizers.LARS])
def test_momentum_out_of_range_is_refused(family):
    with pytest.raises(ValueError, match="momentum must be from 0 to 1, got 1.5"):
        family(0.1, momentum=1.5)


def test_other_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="weight_decay must be 0 or more, or None; got -1"):
        optimizers.SGD(0.1, weight_decay=-1)
    with pytest.raises(ValueError, match="initial_accumulator_value"):
        optimizers.Adagrad(0.1, -0.1)
    with pytest.raises(ValueError, match=r"learning_rate_power must be 0 or less, got 0.5"):
        optimizers.Ftrl(0.1, 0.5)
    with pytest.raises(ValueError, match=r"l1_regularization_strength must be 0 or more, got -1"):
        optimizers.Ftrl(0.1, l1_regularization_strength=-1)
    for make, name in [(optimizers.Adam, "beta_1"), (optimizers.LAMB, "beta_2"), (optimizers.RMSprop, "rho")]:
        with pytest.raises(ValueError, match=f"{name} must be 0 or more and less than 1, got 1"):
            make(0.1, **{name: 1.0})
    with pytest.raises(TypeError, match="weight_decy"):
        optimizers.Adam(0.1, weight_decy=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"var_names": "bias"}, r"var_names takes a list of regular expressions, got the text 'bias'; give \['bias'\]"),
        ({"var_list": ["bias"]}, "var_list takes a list of variables .* one of them is a str; names go into var_names"),
        ({"var_list": numpy.ones(2)}, "var_list takes a list of variables .* one of them is a float64"),
    ],
)
def test_what_is_no_list_of_variables_or_names_is_not_left_out_of_the_decay(given, message):
    optimizer = optimizers.SGD(0.1, weight_decay=0.5)
    with pytest.raises(TypeError, match=message):
        optimizer.exclude_from_weight_decay(**given)


def test_a_variable_that_comes_twice_is_refused():
    v, w = Variable(numpy.zeros(1), name="v"), Variable(numpy.zeros(1), name="w")
    with pytest.raises(ValueError, match="variable 'v.*' has two gradients in one step; add them"):
        optimizers.SGD(0.1).apply_gradients([(numpy.ones(1), v), (numpy.ones(1), w), (numpy.ones(1), v)])
    assert (v.value == 0).all() and (w.value == 0).all()


def test_which_families_can_be_updated_by_slices():
    assert all(make().elementwise for make in FAMILIES.values())
    assert not any(make().elementwise for make in LAYERWISE.values())
    for option in ({"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"skip_nonfinite": True}):
        assert not optimizers.SGD(0.1, **option).elementwise
    assert not optimizers.LossScaleOptimizer(optimizers.SGD(0.1)).elementwise


@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from(sorted(FAMILIES)))
def test_slices_in_any_order_are_the_whole(cuts, family):
    random = numpy.random.default_rng(2)
    start, gradient = random.normal(size=40), random.normal(size=40)
    expected = steps(FAMILIES[family](), start, [gradient])
    optimizer, v = FAMILIES[family](), Variable(start)
    step = optimizer.step_of(v, optimizer.learning_rate, optimizer.coefficients(optimizer.learning_rate, 0), 1.0)
    bounds = sorted({0, 40, *cuts})
    for first, last in reversed(list(zip(bounds[:-1], bounds[1:], strict=True))):
        where = slice(first, last)
        slots = [slot[where] for slot in optimizer._updates._slots.of(v)]
        optimizer.update(v.storage[where], gradient[where], slots, step)
    assert v.value.tobytes() == expected.value.tobytes()


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_variables_that_are_no_floats_are_refused(family, dtype):
    v = Variable(numpy.zeros(2, dtype), name="count")
    with pytest.raises(TypeError, match=rf"variable 'count\w*' is {dtype} and cannot be updated .*floating dtype"):
        ALL[family]().apply_gradients([(numpy.ones(2), v)])
    assert not v.value.any()
    with pytest.warns(UserWarning, match="count"):
        ALL[family]().apply_gradients([(None, v), ([1.0], Variable([1.0]))])


@pytest.mark.parametrize(
    ("pair_fn", "got"),
    [
        (lambda v: (v, numpy.ones(2)), r"\(DistributedVariable, ndarray\)"),
        (lambda v: (numpy.ones(2), numpy.ones(2)), r"\(ndarray, ndarray\)"),
        (lambda v: v, "DistributedVariable"),
        (lambda v: (numpy.ones(2), v, 1), "tuple"),
    ],
)
def test_pairs_in_another_order_are_refused(pair_fn, got):
    v = Variable(numpy.zeros(2))
    with pytest.raises(TypeError, match=rf"pairs \(gradient, variable\), in this order; pair 1 is {got}\."):
        optimizers.SGD(1.0).apply_gradients([(numpy.ones(2), v), pair_fn(v)])
    assert not v.value.any()


NO_NUMBERS = {
    "complex": numpy.ones((2, 1), "c8"),
    "objects": numpy.array([[1], [2]], object),
    "times": numpy.zeros((2, 1), "m8[s]"),
    "records": numpy.zeros((2, 1), [("a", "f4")]),
    "text": numpy.array([["1"], ["2"]]),
}


@pytest.mark.parametrize("are_rows", [False, True])
@pytest.mark.parametrize("gradient", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_a_gradient_of_something_else_than_the_variable_is_refused(gradient, are_rows):
    variable = Variable(numpy.zeros((2, 1), "f4"))
    with pytest.raises(UnsupportedDtypeError, match=f"{variable.name}.*{re.escape(str(gradient.dtype))}.*float32"):
        given = IndexedSlices(gradient, [0, 1], (2, 1)) if are_rows else gradient
        optimizers.SGD(1.0).apply_gradients([(given, variable)])
    assert not variable.value.any()


@pytest.mark.parametrize("family", ["SGD", "Adam", "AdamW", "Adagrad", "Ftrl", "RMSprop", "LARS", "LAMB"])
def test_an_option_that_does_not_exist_is_refused_by_the_name_of_the_family(family):
    with pytest.raises(TypeError, match=f"^{family} has no option 'clipnrom'; did you mean clipnorm\\?$"):
        getattr(optimizers, family)(0.1, clipnrom=1.0)
    with pytest.raises(TypeError, match=f"^{family} has no option 'lr'; expected one of .*, learning_rate, "):
        getattr(optimizers, family)(lr=0.1)


def test_options_of_a_family_are_meant_too():
    with pytest.raises(TypeError, match=r"^SGD has no option 'momentun'; did you mean momentum\?$"):
        optimizers.SGD(0.1, momentun=0.9)
