"""The law on a GPU: with every optimizer, N ranks train to what one process does on NumPy and the global batch."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import numpy
import pytest

import mpidist
from mpidist.device.answers import Answer
from mpidist.optimizers import LAMB, LARS, SGD, Adagrad, Adam, AdamW, Ftrl, LossScaleOptimizer, RMSprop
from tests.gpu.library import (
    check_on_all_ranks,
    host,
    is_emulated,
    is_own,
    place,
    problem_of,
    problems_of,
    slowly,
    strategy,
)
from tests.helpers.optimizers import OPTIMIZERS

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:OneDeviceStrategy reduces nothing"),
    pytest.mark.filterwarnings("ignore:cupyx.allow_synchronize will be removed"),
]

STEPS, ROWS = 8, 24
#: Those of the host's law, and two more.
WITH_MORE = {
    **OPTIMIZERS,
    "decay": lambda: SGD(0.1, momentum=0.9, weight_decay=0.01),
    "skipping": lambda: Adam(0.01, skip_nonfinite=True),
}
SHAPES = {"hidden": (4, 50), "bias": (50,), "out": (50, 2), "scale": ()}


def cuts(kind, size):
    """Return where each rank's rows of a batch begin, and where the last ones end."""
    if kind == "even":
        return [ROWS * rank // size for rank in range(size + 1)]
    if kind == "uneven":
        return [*(ROWS * rank // (size + 2) for rank in range(size)), ROWS]
    return [0, *[ROWS] * size]  # all rows are rank 0's


def rows(step):
    random = numpy.random.default_rng(step)
    return random.normal(size=(ROWS, 4)), random.normal(size=(ROWS, 2))


def gradients(xp, parameters, x, y, scale_loss):
    """Return those of the squared errors' sum by the rows of the global batch."""
    hidden, bias, out, scale = parameters
    activated = xp.tanh(x @ hidden + bias)
    raw = activated @ out
    error = scale_loss(2 * (raw * scale - y) / ROWS)
    back = ((error * scale) @ out.T) * (1 - activated**2)
    return [x.T @ back, back.sum(axis=0), activated.T @ (error * scale), (error * raw).sum()]


def trained(xp, where, optimizer, kind, rank=0, size=1, dtype="f8"):
    """Return the variables after some steps on this rank's rows of each batch."""
    random = numpy.random.default_rng(0)
    with where.scope():
        variables = [
            mpidist.Variable(xp.asarray((random.normal(size=shape) / 8).astype(dtype)), name=name)
            for name, shape in SHAPES.items()
        ]
        optimizer = optimizer()

    def step(x, y):
        found = gradients(xp, [v.value for v in variables], x, y, optimizer.scale_loss)
        optimizer.apply_gradients(zip(found, variables, strict=True))

    for number in range(STEPS):
        at = cuts(kind, size)
        part = slice(at[rank], at[rank + 1])
        where.run(step, args=tuple(xp.asarray(each[part].astype(dtype)) for each in rows(number)))
    return variables, optimizer


@functools.cache
def alone(name, dtype):
    one = mpidist.OneDeviceStrategy("/cpu:0")
    return [v.numpy() for v in trained(numpy, one, WITH_MORE[name], "even", dtype=dtype)[0]]


@pytest.mark.parametrize("name", WITH_MORE)
def test_n_ranks_train_to_what_one_process_trains_to(xp, name):
    found, problems = {}, []
    for kind in ("even", "uneven", "empty"):
        variables, optimizer = trained(xp, strategy(), WITH_MORE[name], kind, *place())
        found[kind] = [xp.array(v.value) for v in variables]
        slots = [slot for v in variables for slot in optimizer.slots(v).values()]
        problems += [] if all(is_own(xp, slot) for slot in slots) else ["slots lie elsewhere"]
    for kind, values in found.items():
        problem = problems_of(xp, values, alone(name, "f8"), rtol=1e-12, atol=1e-12)
        problems += [f"{kind} {problem}"] if problem else []
    check_on_all_ranks("; ".join(problems))


class Own(SGD):
    """A user's rule, which has no formula."""

    def update(self, parameter, gradient, slots, step):
        super().update(parameter, gradient, slots, step)


RULES = {
    "sgd": lambda **given: SGD(0.1, **given),
    "momentum": lambda **given: SGD(0.1, momentum=0.9, **given),
    "nesterov": lambda **given: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **given),
    "adam": lambda **given: Adam(0.01, **given),
    "adamw": lambda **given: AdamW(0.01, **given),
    "adagrad": lambda **given: Adagrad(0.1, **given),
    "ftrl": lambda **given: Ftrl(0.1, l1_regularization_strength=0.001, **given),
    "rmsprop": lambda **given: RMSprop(0.01, centered=True, momentum=0.5, **given),
    "lars": lambda **given: LARS(0.5, trust_coefficient=0.1, **given),
    "lamb": lambda **given: LAMB(0.01, weight_decay=0.01, **given),
    "own": lambda **given: Own(0.1, momentum=0.9, **given),
}
LIMITS = {
    "clipnorm": {"clipnorm": 0.1},
    "global": {"global_clipnorm": 0.1},
    "skipping": {"skip_nonfinite": True},
    "global, skipping": {"global_clipnorm": 0.1, "skip_nonfinite": True},
    "scaled": {},
    "scaled, clipnorm": {"clipnorm": 0.1},
}


def without_copies(xp):
    """Have each copy raise for which the host waits."""
    if xp is numpy:
        return nullcontext()
    import cupyx

    return cupyx.allow_synchronize(False)


def trained_with_bad_steps(xp, where, rule, limits, rank=0, size=1):
    """Return values, slots and counts after steps of which the third and the sixth are not finite on the last rank."""
    random = numpy.random.default_rng(0)
    with where.scope():
        variables = [mpidist.Variable(xp.asarray(random.normal(size=shape))) for shape in SHAPES.values()]
        optimizer = RULES[rule](**LIMITS[limits])
    if "scaled" in limits:
        optimizer = LossScaleOptimizer(optimizer, 2.0**6, dynamic_growth_steps=2)
    scales = []
    for step in range(STEPS):
        given = []
        for each in SHAPES.values():
            whole = random.normal(size=each)
            given.append(xp.asarray(optimizer.scale_loss(whole / size if size > 1 else whole)))
        if optimizer.skips_nonfinite and step in (2, 5) and rank == size - 1:
            given[step % 4].reshape(-1)[-1] = (numpy.nan, -numpy.inf)[step % 2]
        with without_copies(xp):
            where.run(lambda given=given: optimizer.apply_gradients(zip(given, variables, strict=True)))
        scales.append(optimizer.loss_scale.scale if step % 3 else None)
    slots = [slot for v in variables for slot in optimizer.slots(v).values()]
    return [v.value for v in variables] + slots, [optimizer.iterations, optimizer.skipped_steps, *scales]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("rule", RULES)
def test_n_ranks_clip_and_leave_out_what_one_process_does(xp, rule, limits):
    one = mpidist.OneDeviceStrategy("/cpu:0")
    expected, wanted = trained_with_bad_steps(numpy, one, rule, limits)
    found, counts = trained_with_bad_steps(xp, strategy(), rule, limits, *place())
    problem = problems_of(xp, found, expected, rtol=1e-12, atol=1e-12)
    check_on_all_ranks(problem or ("" if counts == wanted else f"{counts} in place of {wanted}"))


#: Rules, and how far each moves zeros in so many steps of a gradient of 1; a step of LARS is as long as the parameter.
DESCENTS = {
    "sgd": (SGD, lambda steps: steps),
    "own": (Own, lambda steps: steps),
    "lars": (functools.partial(LARS, momentum=0, trust_coefficient=1, weight_decay=0), lambda steps: 2 ** (steps - 1)),
}


@pytest.mark.gpu(only=True)
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("rule", DESCENTS)
def test_the_host_does_not_wait_for_the_step_that_it_begins(xp, monkeypatch, rule, limits, dtype):
    """Behind gradients that take the card a while; of n elements that are all alike, each is the limit by n ** 0.5.

    But for the answer whether a step is left out, where the rule has no formula.
    """
    asked, ask = set(), Answer.__call__
    monkeypatch.setattr(Answer, "__call__", lambda answer: asked.add(answer) or ask(answer))
    _, size = place()
    count, limit = 10_000, next((each for each in LIMITS[limits].values() if not isinstance(each, bool)), None)
    family, length_after = DESCENTS[rule]
    (variable,), optimizer = made(xp, lambda: family(1.0, **LIMITS[limits]), numpy.zeros(count, dtype))
    if "scaled" in limits:
        optimizer = LossScaleOptimizer(optimizer, 2.0)
    left_out, is_answered = int(optimizer.skips_nonfinite), optimizer.skips_nonfinite and not optimizer.has_formula
    gradient, under_way, asked_by_steps = xp.zeros(count, dtype), [], []
    for step in range(4):
        slowly(xp, gradient, optimizer.scale_loss(numpy.nan if left_out and step == 1 else 1 / size))
        with without_copies(xp):
            apply(optimizer, [gradient], [variable])
        begun = xp.cuda.Event()
        begun.record()
        under_way.append(step == 0 or is_answered or not begun.done)  # in the first step kernels are compiled
        asked_by_steps.append(len(asked))
    assert asked_by_steps == [left_out * (step + is_answered) for step in range(4)]
    assert (optimizer.skipped_steps, optimizer.iterations) == (left_out, 4 - left_out)
    expected = numpy.full(count, -length_after(4 - left_out) * (1 if limit is None else limit / count**0.5), dtype)
    check_on_all_ranks(problem_of(xp, variable.value, expected, rtol=2e-3 if dtype == "f2" else 1e-6))
    # a sum that is staged, of several ranks, is waited for; work of an emulated card is done when it is begun
    assert is_emulated() or size > 1 or all(under_way)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw", "lamb", "global"])
def test_in_float32(xp, name):
    variables, _ = trained(xp, strategy(), WITH_MORE[name], "uneven", *place(), dtype="f4")
    problem = problems_of(xp, [v.value for v in variables], alone(name, "f4"), rtol=1e-5, atol=1e-5)
    bits = mpidist.all_gather_object(b"".join(v.numpy().tobytes() for v in variables))
    check_on_all_ranks(problem or len(set(bits)) == 1 or "ranks have other bits")


def made(xp, optimizer, *arrays):
    with strategy().scope():
        return [mpidist.Variable(xp.asarray(each)) for each in arrays], optimizer()


def apply(optimizer, gradients, variables):
    strategy().run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("count", [5, 400_000])
def test_plain_descent(xp, dtype, count):
    rank, size = place()
    variables, optimizer = made(xp, lambda: SGD(0.5), numpy.full(count, 8, dtype), numpy.full((2, 3), 4, dtype))
    given = [xp.asarray(numpy.full(each.shape, rank + 1, dtype)) for each in variables]
    for _ in range(2):
        apply(optimizer, given, variables)
    total = size * (size + 1) / 2
    expected = [numpy.full(count, 8 - total, dtype), numpy.full((2, 3), 4 - total, dtype)]
    check_on_all_ranks(problems_of(xp, [v.value for v in variables], expected))
    check_on_all_ranks(problem_of(xp, given[0], numpy.full(count, rank + 1, dtype)))
    assert optimizer.iterations == 2


def test_clipping_by_the_norm_of_all(xp):
    """Of n gradients that are all alike, each becomes the limit by the root of n."""
    rank, size = place()
    limit, count = 0.25, 10_000
    variables, optimizer = made(
        xp, lambda: SGD(1.0, global_clipnorm=limit), numpy.zeros(count - 100), numpy.zeros((10, 10))
    )
    apply(optimizer, [xp.asarray(numpy.full(v.shape, rank + 1.0)) for v in variables], variables)
    expected = [numpy.full(v.shape, -limit / count**0.5) for v in variables]
    check_on_all_ranks(problems_of(xp, [v.value for v in variables], expected, rtol=1e-12))


@pytest.mark.parametrize("bad", [numpy.nan, numpy.inf])
@pytest.mark.parametrize("count", [5, 300_000])
def test_steps_that_are_not_finite_are_left_out(xp, count, bad):
    """The last rank's gradient has one bad element in the second step of three."""
    rank, size = place()
    variables, optimizer = made(
        xp, lambda: SGD(1.0, skip_nonfinite=True), numpy.zeros(count, "f4"), numpy.zeros(3, "f4")
    )
    for step in range(3):
        given = [numpy.full(v.shape, 1.0, "f4") for v in variables]
        given[0][count // 2] = bad if step == 1 and rank == size - 1 else 1.0
        apply(optimizer, [xp.asarray(each) for each in given], variables)
    expected = [numpy.full(v.shape, -2.0 * size, "f4") for v in variables]
    check_on_all_ranks(problems_of(xp, [v.value for v in variables], expected))
    assert (optimizer.skipped_steps, optimizer.iterations) == (1, 2)


def test_a_loss_scale_that_finds_itself(xp):
    rank, size = place()
    variables, optimizer = made(xp, lambda: LossScaleOptimizer(SGD(1.0), 2.0**4), numpy.zeros(6, "f4"))
    for step in range(3):
        gradient = numpy.full(6, numpy.inf if step == 0 and rank == size - 1 else 1.0, "f4")
        apply(optimizer, [optimizer.scale_loss(xp.asarray(gradient))], variables)
    check_on_all_ranks(problem_of(xp, variables[0].value, numpy.full(6, -2.0 * size, "f4")))
    assert optimizer.skipped_steps == 1
    assert float(host(optimizer.scale_loss(xp.asarray(numpy.ones(1, "f4"))))[0]) == 2.0**3


@pytest.mark.filterwarnings("ignore:gradients are None")
@pytest.mark.parametrize("missing", [(), (0, 7, 8)])
def test_many_short_variables(xp, missing):
    """Velocities after t steps of gradient g are ``-g (2 - 2 ** (1 - t))``."""
    rank, size = place()
    variables, optimizer = made(xp, lambda: SGD(1.0, momentum=0.5), *(numpy.zeros(n % 5, "f4") for n in range(100)))
    given = [None if n in missing else xp.asarray(numpy.full(n % 5, n * (rank + 1), "f4")) for n in range(100)]
    for _ in range(3):
        apply(optimizer, given, variables)
    total = size * (size + 1) / 2
    expected = [numpy.full(n % 5, 0 if n in missing else -(1 + 1.5 + 1.75) * n * total, "f4") for n in range(100)]
    check_on_all_ranks(problems_of(xp, [v.value for v in variables], expected))


def test_rows_of_a_table(xp):
    """Gradients that are some rows, the same ones on several ranks."""
    rank, size = place()
    variables, optimizer = made(xp, lambda: SGD(1.0), numpy.zeros((6, 2), "f8"))
    where = numpy.array([0, 1 + rank % 5, 0])
    rows_of = mpidist.IndexedSlices(xp.asarray(numpy.ones((3, 2))), xp.asarray(where), (6, 2))
    apply(optimizer, [rows_of], variables)
    expected = numpy.zeros((6, 2))
    for each in range(size):
        numpy.subtract.at(expected, [0, 1 + each % 5, 0], 1.0)
    check_on_all_ranks(problem_of(xp, variables[0].value, expected))


def test_values_that_are_held_stay_as_they_are(xp):
    _, size = place()
    variables, optimizer = made(xp, lambda: SGD(1.0), numpy.zeros(1000, "f4"))
    held = []
    for _ in range(4):
        held.append(variables[0].value.copy())
        apply(optimizer, [xp.asarray(numpy.ones(1000, "f4"))], variables)
    check_on_all_ranks(problems_of(xp, held, [numpy.full(1000, -step * size, "f4") for step in range(4)]))


@pytest.mark.parametrize("given", ["own", "host"])
def test_a_row_that_is_large_or_infinite_spoils_no_other(xp, given):
    """Each row is summed by itself, and not as a difference of sums of all rows before."""
    rank, size = place()
    where = numpy.array([3, 0, 2, 1, 2, 0])
    values = numpy.array([[5.0, 0], [1e17, 0], [2, 3], [numpy.inf, 1], [4, 1], [1e17, 0]])
    variables, optimizer = made(xp, lambda: SGD(1.0), numpy.zeros((5, 2), "f8"))
    rows_of = mpidist.IndexedSlices(xp.asarray(values), xp.asarray(where) if given == "own" else where, (5, 2))
    apply(optimizer, [rows_of], variables)
    expected = numpy.array([[2e17, 0], [numpy.inf, 1], [6, 4], [5, 0], [0, 0]])
    problem = problem_of(xp, rows_of.to_dense(), expected)
    check_on_all_ranks(problem or problem_of(xp, variables[0].value, -size * expected, rtol=1e-15))


@pytest.mark.parametrize("kind", ["central", "workers"])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_for_variables_on_the_host(xp, kind, count):
    """They are copied there; central storage has its variables there on several ranks, whatever they are made of."""
    rank, size = place()
    there = mpidist.CentralStorageStrategy() if kind == "central" else strategy()
    with there.scope():
        variables = [mpidist.Variable(numpy.zeros((6, 2))) for _ in range(2)]
        optimizer = SGD(1.0, gradient_accumulation_steps=count)
    where = numpy.array([0, 1 + rank % 5, 0])
    rows_of = mpidist.IndexedSlices(xp.ones((3, 2)), xp.asarray(where), (6, 2))
    for _ in range(count):
        there.run(lambda: optimizer.apply_gradients(zip((rows_of, xp.ones((6, 2))), variables, strict=True)))
    expected = numpy.zeros((6, 2))
    for each in range(size):
        numpy.subtract.at(expected, [0, 1 + each % 5, 0], 1.0)
    wanted = [expected, numpy.full((6, 2), -float(size))]
    check_on_all_ranks(problems_of(numpy, [v.value for v in variables], wanted))
