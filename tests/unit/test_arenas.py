"""Variables that lie side by side: where they lie, when their memory goes, and updates of runs of them."""

import copy
import gc
import pickle
import weakref

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.collectives.reductions import update
from mpidist.collectives.reductions.results import Packed
from mpidist.optimizers import LAMB, SGD
from mpidist.optimizers.updates.variable_list import VariableList
from mpidist.testing import run_ranks
from mpidist.variables import Arenas

ALIGNMENT = 64


def _address(array):
    return array.__array_interface__["data"][0]


def test_short_variables_lie_densely_in_aligned_blocks():
    arenas = Arenas()
    first, second, other = arenas.take(3, "f4"), arenas.take(5, "f4"), arenas.take(2, "f8")
    assert first.block is second.block
    assert (first.start, first.stop, second.start, second.stop) == (0, 3, 3, 8)
    assert other.block is not first.block
    assert {_address(each.block) % ALIGNMENT for each in (first, second, other)} == {0}


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "g"])
def test_longer_variables_begin_aligned(dtype):
    arenas = Arenas()
    slices = [arenas.take(size, dtype) for size in (1, 1 << 14, 3, 1 << 18, 5)]
    values = [each.block[each.start : each.stop] for each in slices]
    assert [_address(values[n]) % ALIGNMENT for n in (1, 3)] == [0, 0]
    assert [each.size for each in values] == [1, 1 << 14, 3, 1 << 18, 5]
    for number, each in enumerate(values):
        each[...] = number
    assert [set(each.tolist()) for each in values] == [{0}, {1}, {2}, {3}, {4}]  # none lies in another


def test_a_block_goes_with_its_last_variable():
    variables = [mpidist.Variable(numpy.ones(7, "f4")) for _ in range(3)]
    blocks = [weakref.ref(each.block_slice.block) for each in variables]
    first = variables.pop(0)
    variables.clear()
    gc.collect()
    assert blocks[0]() is not None
    del first
    gc.collect()
    assert blocks[0]() is None
    assert mpidist.Variable(numpy.ones(7, "f4")).value.tolist() == [1] * 7  # in a new block


def test_memory_that_a_view_refers_to_is_not_used_again():
    variable = mpidist.Variable(numpy.full(5, 3.0))
    view = variable.value
    del variable
    gc.collect()
    others = [mpidist.Variable(numpy.zeros(5)) for _ in range(300)]
    assert view.tolist() == [3] * 5
    assert not any(numpy.shares_memory(view, each.value) for each in others)


@pytest.mark.parametrize(
    "options",
    [{"synchronization": "on_read", "aggregation": "sum"}, {"trainable": False}],
)
def test_what_optimizers_do_not_update_lies_by_itself(options):
    assert mpidist.Variable(numpy.ones(3), **options).block_slice is None


def test_a_pickle_has_one_variable_and_not_its_neighbours():
    neighbour, variable = mpidist.Variable(numpy.ones(15000)), mpidist.Variable(numpy.arange(4.0))
    content = pickle.dumps(variable)
    again = pickle.loads(content)
    assert len(content) < 1 << 16
    again.assign_add(numpy.ones(4))
    assert again.value.tolist() == [1, 2, 3, 4]
    assert variable.value.tolist() == [0, 1, 2, 3]
    SGD(1.0).apply_gradients([(numpy.ones(4), again), (numpy.ones(4), variable), (numpy.ones(15000), neighbour)])
    assert (again.value.tolist(), variable.value.tolist()) == ([0, 1, 2, 3], [-1, 0, 1, 2])


# -- runs -------------------------------------------------------------------------------------------------------------


def _runs(optimizer, variables, kept=None):
    listed = VariableList([each for n, each in enumerate(variables) if kept is None or n in kept])
    packs = listed.packed([numpy.zeros(each.shape, each.dtype) for each in listed.variables])
    runs = listed.runs(packs, optimizer._updates._slots, listed.decays(optimizer))
    return [[(run.where.start, run.where.stop) for run in each] for each in runs]


def test_neighbours_are_one_run():
    variables = [mpidist.Variable(numpy.ones(shape, "f4")) for shape in [(2, 3), (), (5,)]]
    assert _runs(SGD(0.1, momentum=0.9), variables) == [[(0, 12)]]


def test_a_missing_gradient_another_decay_and_another_order_split_runs():
    variables = [mpidist.Variable(numpy.ones(2), name=f"v{n}") for n in range(4)]
    optimizer = SGD(0.1, momentum=0.5, weight_decay=0.1)
    assert _runs(optimizer, variables) == [[(0, 8)]]
    assert _runs(optimizer, variables, {0, 2, 3}) == [[(0, 2), (2, 6)]]
    assert _runs(optimizer, variables[::-1]) == [[(0, 2), (2, 4), (4, 6), (6, 8)]]
    optimizer.exclude_from_weight_decay([variables[3]])
    assert _runs(optimizer, variables) == [[(0, 6), (6, 8)]]


def test_each_dtype_is_packed_by_itself():
    variables = [mpidist.Variable(numpy.ones(3, dtype)) for dtype in ("f4", "f8", "f4", "f2")]
    assert _runs(SGD(0.1), variables) == [[(0, 6)], [(0, 3)], [(0, 3)]]


def test_packed_gradients_are_in_the_order_of_the_axes():
    listed = VariableList([mpidist.Variable(numpy.zeros((2, 2))), mpidist.Variable(0.0, dtype="float64")])
    (pack,) = listed.packed([numpy.array([[1.0, 2.0], [3.0, 4.0]]).T, numpy.array(5.0)])
    assert isinstance(pack, Packed)
    assert pack.values.tolist() == [1, 3, 2, 4, 5]


def test_a_whole_run_is_one_call_of_the_rule():
    class Counting(SGD):
        calls = 0

        def update_slice(self, *arguments):
            self.calls += 1
            super().update_slice(*arguments)

    variables = [mpidist.Variable(numpy.zeros(10, "f4")) for _ in range(50)]
    optimizer = Counting(1.0, momentum=0.5)
    for _ in range(2):
        optimizer.apply_gradients([(numpy.full(10, n, "f4"), each) for n, each in enumerate(variables)])
    assert optimizer.calls == 2
    assert [set(each.value) for each in variables] == [{-2.5 * n} for n in range(50)]


def _trained_together(optimizer):
    variables = [mpidist.Variable(numpy.full(n + 1, n + 1.0)) for n in range(4)]
    gradients = [numpy.full(n + 1, 2.0 * n + 1) for n in range(4)]
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    return [each.value.tolist() for each in variables]


def test_norms_are_those_of_each_variable_and_not_of_a_run():
    found = _trained_together(SGD(1.0, clipnorm=1.0))  # each step has the norm 1
    for n, values in enumerate(found):
        numpy.testing.assert_allclose(values, [n + 1 - 1 / numpy.sqrt(n + 1)] * (n + 1), rtol=1e-12)
    for n, values in enumerate(_trained_together(LAMB(0.5))):  # each step has the norm of its variable
        numpy.testing.assert_allclose(values, [0.5 * (n + 1)] * (n + 1), rtol=1e-6)


def test_a_norm_of_all_is_one_factor_for_a_run():
    squares = sum((n + 1) * (2 * n + 1) ** 2 for n in range(4))
    for n, values in enumerate(_trained_together(SGD(1.0, global_clipnorm=1.0))):
        numpy.testing.assert_allclose(values, [n + 1 - (2 * n + 1) / numpy.sqrt(squares)] * (n + 1), rtol=1e-12)


def test_slots_of_neighbours_are_live_views_of_their_own():
    first, second = mpidist.Variable(numpy.zeros(2)), mpidist.Variable(numpy.zeros(3))
    optimizer = SGD(1.0, momentum=0.5)
    optimizer.apply_gradients([(numpy.ones(2), first), (numpy.full(3, 2.0), second)])
    slots = optimizer.slots(second)["momentum"]
    optimizer.apply_gradients([(numpy.ones(2), first), (numpy.full(3, 2.0), second)])
    assert slots.tolist() == [-3] * 3
    assert optimizer.slots(first)["momentum"].tolist() == [-1.5] * 2


def test_slots_that_come_back_from_slices_are_found_again(monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", 1)  # lists are sharded that have to be summed

    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variables = [mpidist.Variable(numpy.zeros(10)) for _ in range(3)]
            optimizer = SGD(1.0, momentum=0.5)
        pairs = [(numpy.ones(10), each) for each in variables]
        for are_sums in (True, False, True, False, True):
            strategy.run(optimizer.apply_gradients, args=(pairs, are_sums))
        return [set(each.value) for each in variables]

    expected, velocity = 0.0, 0.0
    for gradient in (1, 2, 1, 2, 1):
        velocity = 0.5 * velocity - gradient
        expected += velocity
    assert run_ranks(2, run) == [[{expected}] * 3] * 2


# -- everything at random, against a textbook -------------------------------------------------------------------------


class Textbook:
    """One variable with momentum 1/2 and learning rate 1: sums of few powers of 2, exact in every dtype used."""

    def __init__(self, value):
        self.value, self.velocity = value, 0.0

    def step(self, gradient):
        self.velocity = 0.5 * self.velocity - gradient
        self.value += self.velocity


ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 1), st.sets(st.integers(0, 7), max_size=3)),
    st.tuples(st.just("renew"), st.integers(0, 7)),
    st.tuples(st.just("copy"), st.integers(0, 7)),
    st.tuples(st.just("assign"), st.integers(0, 7)),
    st.tuples(st.just("save"), st.integers(0, 1)),
    st.tuples(st.just("restore"), st.integers(0, 1)),
)
SHAPES = [(), (3,), (2, 2), (1,), (0,), (5,), (2,), (4,)]


class Game:
    """Two optimizers, the variables of one between those of the other."""

    def __init__(self, strategy, dtypes):
        self.strategy, self.dtypes = strategy, dtypes
        self.replicas, self.rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
        self.variables, self.expected, self.saved = [], [], {}
        self.count = 0
        for number in range(len(SHAPES)):
            self.variables.append(self._new(number))
            self.expected.append(Textbook(float(number)))
        with strategy.scope():
            self.optimizers = [SGD(1.0, momentum=0.5) for _ in range(2)]

    def _new(self, number):
        self.count += 1
        with self.strategy.scope():
            values = numpy.full(SHAPES[number], number, self.dtypes[number])
            return mpidist.Variable(values, name=f"v{number}_{self.count}")

    def step(self, which, without):
        own = [n for n in range(which, len(SHAPES), 2)]
        present = [n for n in own if n not in without]
        if not present:
            return
        gradients = {n: numpy.full(SHAPES[n], (n + 1) * (self.rank + 1), self.dtypes[n]) for n in present}
        pairs = [(gradients.get(n), self.variables[n]) for n in own]
        self.strategy.run(self.optimizers[which].apply_gradients, args=(pairs,))
        for n in present:
            self.expected[n].step((n + 1) * self.replicas * (self.replicas + 1) / 2)

    def renew(self, n):
        self.variables[n], self.expected[n] = self._new(n), Textbook(float(n))
        self.saved.clear()

    def copy(self, n):
        self.variables[n] = copy.deepcopy(self.variables[n])
        self.expected[n].velocity = 0.0  # the copy is new to the optimizer
        self.saved.clear()

    def assign(self, n):
        self.variables[n].assign(numpy.full(SHAPES[n], 7, self.dtypes[n]))
        self.expected[n].value = 7.0

    def save(self, which):
        own = self.expected[which::2]
        state = copy.deepcopy(self.optimizers[which].state())
        self.saved[which] = state, [each.velocity for each in own]

    def restore(self, which):
        if which not in self.saved:
            return
        state, velocities = self.saved[which]
        self.optimizers[which].restore(state)
        for each, velocity in zip(self.expected[which::2], velocities, strict=True):
            each.velocity = velocity

    def check(self):
        for n, (variable, expected) in enumerate(zip(self.variables, self.expected, strict=True)):
            assert variable.value.tolist() == numpy.full(SHAPES[n], expected.value).tolist()
            slot = self.optimizers[n % 2].slots(variable)["momentum"]
            assert slot.tolist() == numpy.full(SHAPES[n], expected.velocity).tolist()


@pytest.mark.filterwarnings("ignore:gradients are None")
@pytest.mark.parametrize("size", [1, 2])
@settings(max_examples=40, deadline=None)
@given(dtypes=st.lists(st.sampled_from(["f4", "f8"]), min_size=8, max_size=8), actions=st.lists(ACTIONS, max_size=6))
def test_two_optimizers_over_variables_between_each_other(size, dtypes, actions):
    def play():
        game = Game(mpidist.MultiWorkerMirroredStrategy(), dtypes)
        for verb, *arguments in actions:
            getattr(game, verb)(*arguments)
        game.check()

    run_ranks(size, play)
