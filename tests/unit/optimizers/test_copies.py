"""Optimizers that are pickled, copied, or taken apart into their rule; and steps within steps."""

import copy
import pickle
import threading

import numpy
import pytest

import mpidist
from mpidist import optimizers
from mpidist.collectives.reductions import update
from mpidist.optimizers import SGD
from mpidist.optimizers.base import rule_of
from mpidist.parameter_server.pickles import packed
from mpidist.testing import run_ranks
from tests.unit.parameter_server.jobs import one_worker

FAMILIES = {
    "sgd": lambda: optimizers.SGD(0.5, weight_decay=0.25),
    "momentum": lambda: optimizers.SGD(0.5, momentum=0.5, nesterov=True),
    "adam": lambda: optimizers.Adam(0.5),
    "adamw": lambda: optimizers.AdamW(0.5, clipvalue=0.5),
    "adagrad": lambda: optimizers.Adagrad(0.5),
    "ftrl": lambda: optimizers.Ftrl(0.5, l1_regularization_strength=0.25),
    "rmsprop": lambda: optimizers.RMSprop(0.5, momentum=0.5),
    "lars": lambda: optimizers.LARS(0.5),
    "lamb": lambda: optimizers.LAMB(0.5, weight_decay=0.25),
}


def _velocities(gradients, velocity=0.0):
    """Return the steps of momentum 1/2 and learning rate 1."""
    for gradient in gradients:
        velocity = 0.5 * velocity - gradient
        yield velocity


class Locked(SGD):
    """Has something that cannot be copied, and leaves it out."""

    def __init__(self, learning_rate):
        super().__init__(learning_rate)
        self.lock = threading.Lock()

    def __getstate__(self):
        state = super().__getstate__()
        del state["lock"]
        return state


# -- pickles and copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_class_says_what_of_an_optimizer_is_copied(again):
    optimizer = Locked(0.25)
    copied = again(optimizer)
    assert type(copied) is Locked and copied.learning_rate == 0.25
    assert hasattr(optimizer, "lock") and not hasattr(copied, "lock")


def test_a_pickled_optimizer_goes_on_with_the_pickled_variables():
    variables = [mpidist.Variable(numpy.zeros(n + 1)) for n in range(3)]
    optimizer = SGD(1.0, momentum=0.5)
    optimizer.apply_gradients([(numpy.ones(n + 1), each) for n, each in enumerate(variables)])
    content = pickle.dumps((optimizer, variables))
    again, copies = pickle.loads(content)
    assert len(content) < 1 << 17  # nothing of what lies beside the variables
    for step in (2.0, 3.0):
        again.apply_gradients([(numpy.full(n + 1, step), each) for n, each in enumerate(copies)])
    assert [set(each.value) for each in copies] == [{sum(_velocities([1, 2, 3]))}] * 3
    assert [set(each.value) for each in variables] == [{-1.0}] * 3
    assert (again.iterations, optimizer.iterations) == (3, 1)
    assert [set(again.slots(each)["momentum"]) for each in copies] == [{-4.25}] * 3


def test_what_is_pickled_has_nothing_of_what_the_process_made_before():
    mpidist.Variable(0.0, name="n" * (1 << 18))
    variable, metric = mpidist.Variable(numpy.zeros(3)), mpidist.metrics.Mean()
    content = pickle.dumps((variable, metric, mpidist.get_strategy()))
    again, metric_again, strategy = pickle.loads(content)
    assert len(content) < 1 << 16
    assert again.strategy is metric_again.strategy is strategy is mpidist.get_strategy()
    strategy.extended.update(again, lambda each: each.assign(numpy.ones(3)))
    assert (again.value.tolist(), variable.value.tolist()) == ([1] * 3, [0] * 3)


def test_what_belongs_to_ranks_is_not_pickled():
    def run():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            variable, optimizer, metric = mpidist.Variable(numpy.zeros(3)), SGD(0.1), mpidist.metrics.Mean()
        strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(3), variable)]))
        for each in (strategy, variable, optimizer, metric):
            with pytest.raises(TypeError, match="cannot be pickled or copied: .* Pickle the `value` of a variable"):
                pickle.dumps(each)

    run_ranks(2, run)


def test_the_slots_of_a_pickle_are_those_of_its_variables_in_any_order():
    variables = [mpidist.Variable(numpy.zeros(2)) for _ in range(4)]
    optimizer = SGD(1.0, momentum=0.5)
    optimizer.apply_gradients([(numpy.full(2, n + 1.0), each) for n, each in enumerate(variables)])
    again, copies = pickle.loads(pickle.dumps((optimizer, variables)))
    assert [again.slots(each)["momentum"].tolist() for each in copies[::-1]] == [[-n, -n] for n in (4.0, 3.0, 2.0, 1.0)]
    new = mpidist.Variable(numpy.zeros(2))
    again.apply_gradients([(numpy.full(2, 7.0), new), *((numpy.zeros(2), each) for each in copies[::-1])])
    assert [each.value[0] for each in (new, *copies)] == [-7, -1.5, -3, -4.5, -6]


def test_slots_in_slices_are_not_pickled(monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", 1)

    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable, optimizer = mpidist.Variable(numpy.zeros(40)), SGD(1.0, momentum=0.5)
        strategy.run(optimizer.apply_gradients, args=([(numpy.ones(40), variable)],))
        with pytest.raises(TypeError, match="each rank keeps a part of the slots .* `Optimizer.state`"):
            optimizer._updates.__getstate__()
        return set(variable.value)

    assert run_ranks(2, run) == [{-2.0}] * 2


def test_a_copy_after_a_step_that_was_left_out_makes_no_variables():
    variables = [mpidist.Variable(numpy.zeros(3), name=f"one{n}") for n in range(3)]
    optimizer = SGD(1.0, momentum=0.5, skip_nonfinite=True)
    optimizer.apply_gradients([(numpy.full(3, numpy.inf), each) for each in variables])
    new = copy.deepcopy(optimizer)
    assert mpidist.Variable(1.0, name="one0").name == "one0_1"
    new.apply_gradients([(numpy.ones(3), each) for each in variables])
    assert [set(each.value) for each in variables] == [{-1.0}] * 3
    assert (optimizer.skipped_steps, optimizer.iterations, new.skipped_steps, new.iterations) == (1, 0, 1, 1)


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_of_an_optimizer_steps_alike(family):
    optimizer, variable = FAMILIES[family](), mpidist.Variable(numpy.linspace(1, 2, 6))
    rule = pickle.loads(pickle.dumps(rule_of(optimizer)))
    assert type(rule) is type(optimizer)
    parameter, gradient = variable.numpy().copy(), numpy.linspace(-1, 3, 6)
    initial = rule.initial_slots()
    slots = [numpy.full(6, initial.get(name, 0.0)) for name in rule.slot_names]
    for _ in range(3):
        coefficients = rule.coefficients(rule.learning_rate, rule.iterations)
        rule.update(parameter, gradient, slots, rule.step_of(variable, rule.learning_rate, coefficients, 1.0))
        rule.iterations += 1
    for _ in range(3):
        optimizer.apply_gradients([(gradient, variable)])
    assert (rule.iterations, rule._joins) == (optimizer.iterations, optimizer._joins)
    assert parameter.tolist() == variable.value.tolist()


def test_a_rule_has_settings_and_schedule_but_no_steps_and_knows_variables_by_name():
    variable = mpidist.Variable(1.0, name="bias")
    optimizer = SGD(lambda step: 1 / (1 + step), weight_decay=0.5, gradient_accumulation_steps=1)
    optimizer.exclude_from_weight_decay([variable])
    optimizer.apply_gradients([(numpy.float32(0), variable)])
    rule = rule_of(optimizer)
    assert (optimizer.iterations, rule.iterations, rule.learning_rate, rule.has_schedule) == (1, 0, 1.0, True)
    assert (rule.decay_of(variable), rule.decay_of(mpidist.Variable(1.0, name="w"))) == (0, 0.5)
    with pytest.raises(TypeError, match="the learning rate of this SGD"):
        rule.learning_rate = 0.5


class Halving(SGD):
    """A user's: half of the step."""

    def update_slice(self, parameter, gradient, slots, scratch, coefficients):
        super().update_slice(parameter, gradient / 2, slots, scratch, coefficients)


def test_the_rule_of_a_users_class_is_the_users():
    rule = rule_of(Halving(1.0, clipnorm=1.0))
    parameter = numpy.zeros(2)
    rule.update(parameter, numpy.ones(2), [], rule.step_of(None, 1.0, rule.coefficients(1.0, 0), 1.0))
    assert parameter.tolist() == [-0.5, -0.5]
    assert rule.iterations == 0 and not hasattr(rule, "_stages")


@pytest.mark.parametrize("make", [*FAMILIES.values(), lambda: Halving(1.0, momentum=0.5)])
def test_steps_add_nothing_to_what_travels_to_servers(make):
    optimizer, variables = make(), [mpidist.Variable(numpy.zeros(1 << 12)) for _ in range(3)]
    before = packed(optimizer)
    for _ in range(2):
        optimizer.apply_gradients([(numpy.ones(1 << 12), each) for each in variables])
    assert packed(optimizer) == before and len(before) < 1 << 9
    settings = vars(pickle.loads(before))
    assert settings.keys() == vars(optimizer).keys() - {"_stages", "_updates", "_lists"}


class ByWhole(SGD):
    """A user's that looks at whole gradients."""

    @property
    def takes_slices(self):
        return False

    def update_slice(self, parameter, gradient, slots, scratch, coefficients):
        parameter -= gradient / abs(gradient).max()


def test_a_rule_of_whole_gradients_gets_them_one_by_one():
    variables = [mpidist.Variable(numpy.zeros(2)) for _ in range(3)]
    ByWhole(1.0).apply_gradients([(numpy.full(2, n + 1.0), each) for n, each in enumerate(variables)])
    assert [each.value.tolist() for each in variables] == [[-1, -1]] * 3


# -- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_schedule_may_make_a_step_of_its_own_on_a_list_that_is_alike(size):
    """Sums are packed in memory that the next step of such a list uses again."""

    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variables = [mpidist.Variable(numpy.zeros(4)) for _ in range(3)]
            inner = SGD(1.0)
            inside = [(numpy.full(4, 16.0), each) for each in variables]

            def schedule(step):
                inner.apply_gradients(inside)
                return 1.0

            outer = SGD(schedule)
        for _ in range(3):
            strategy.run(outer.apply_gradients, args=([(numpy.ones(4), each) for each in variables],))
        return [set(each.value) for each in variables]

    assert run_ranks(size, run) == [[{-3 * 17.0 * size}] * 3] * size


def test_two_optimizers_of_the_same_variables_have_slots_of_their_own():
    variables = [mpidist.Variable(numpy.zeros(3)) for _ in range(3)]
    first, second = SGD(1.0, momentum=0.5), SGD(1.0, momentum=0.5)
    for _ in range(2):
        first.apply_gradients([(numpy.ones(3), each) for each in variables])
        second.apply_gradients([(numpy.full(3, 4.0), each) for each in variables[1:]])
    expected = [sum(_velocities([1, 1]))] + [sum(_velocities([1, 1])) + sum(_velocities([4, 4]))] * 2
    assert [set(each.value) for each in variables] == [{each} for each in expected]
    assert set(first.slots(variables[1])["momentum"]) == {-1.5}
    assert set(second.slots(variables[1])["momentum"]) == {-6.0}


def test_new_variables_in_the_place_of_old_ones_begin_with_new_slots():
    optimizer = SGD(1.0, momentum=0.5)
    for _ in range(12):
        variables = [mpidist.Variable(numpy.zeros(1 << 12)) for _ in range(10)]  # a block after the other
        for _ in range(2):
            optimizer.apply_gradients([(numpy.ones(1 << 12), each) for each in variables])
        assert [set(each.value) for each in variables] == [{-2.5}] * 10
        del variables


def test_a_list_in_any_order_with_gradients_that_come_and_go():
    count, random = 12, numpy.random.default_rng(0)
    variables = [mpidist.Variable(numpy.zeros(n % 3 + 1, ("f4", "f8", "f2")[n % 4 % 3])) for n in range(count)]
    optimizer, given = SGD(1.0, momentum=0.5), [[] for _ in range(count)]
    for _ in range(6):
        present = [n for n in random.permutation(count) if random.random() < 0.7]
        for n in present:
            given[n].append(float(n + 1))
        pairs = [(numpy.full(variables[n].shape, n + 1, variables[n].dtype), variables[n]) for n in present]
        optimizer.apply_gradients(pairs)
    assert [set(each.value) for each in variables] == [{sum(_velocities(each))} for each in given]


@pytest.mark.parametrize("is_used", [False, True])
def test_two_copies_of_a_served_optimizer_have_slots_of_their_own(is_used):
    """Servers make the steps of the first; its copies make theirs here, on variables that they share."""

    def job(strategy):
        with strategy.scope():
            served, optimizer = mpidist.Variable(numpy.zeros(3)), SGD(1.0, momentum=0.5)
        if is_used:
            strategy.run(optimizer.apply_gradients, args=([(numpy.ones(3), served)],))
        return [copy.copy(optimizer), copy.copy(optimizer)]

    first, second = one_worker(job)
    variables = [mpidist.Variable(numpy.zeros(3)) for _ in range(3)]
    for _ in range(3):
        first.apply_gradients([(numpy.ones(3), each) for each in variables])
        second.apply_gradients([(numpy.full(3, 4.0), each) for each in variables])
    expected = sum(_velocities([1] * 3)) + sum(_velocities([4] * 3))
    assert [set(each.value) for each in variables] == [{expected}] * 3
    assert set(first.slots(variables[0])["momentum"]) == {-1.75}
    assert set(second.slots(variables[0])["momentum"]) == {-7.0}
