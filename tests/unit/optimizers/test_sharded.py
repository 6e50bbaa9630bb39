"""Updates made slice by slice inside the all-reduce: the same as summing first, and slots that live in slices."""

from weakref import ref

import numpy
import pytest

import mpidist
from mpidist.collectives.reductions import plan_cache, update
from mpidist.collectives.reductions.gradient_buffers import GradientBuffers
from mpidist.errors import CollectiveMismatchError, RankFailedError, TornVariableError
from mpidist.optimizers import SGD, Adam, AdamW
from mpidist.testing import run_ranks

SHAPES = [(40, 30), (7,), (), (300,), (3, 5, 20), (1,)]
OPTIMIZERS = [
    lambda: SGD(0.1),
    lambda: SGD(0.1, momentum=0.9, nesterov=True),
    lambda: Adam(0.01),
    lambda: AdamW(0.01, weight_decay=0.1),
    lambda: mpidist.optimizers.RMSprop(0.01, clipvalue=0.5),
]


@pytest.fixture(autouse=True)
def small_lists_are_sharded(monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", 1)


def _gradients(seed, dtype="f8"):
    random = numpy.random.default_rng(seed)
    return [numpy.asarray(random.normal(size=shape), dtype) for shape in SHAPES]


def _train(make, steps=3, gradients_of=None):
    """Train on the sum over ranks of ``gradients_of(rank, step)``; return variables, slots, and whether it sharded."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    rank = strategy.extended.communicator.rank
    with strategy.scope():
        variables = [mpidist.Variable(values, name=f"v{n}") for n, values in enumerate(_gradients(99))]
        optimizer = make()
    for step in range(steps):
        gradients = (gradients_of or (lambda rank, step: _gradients([rank, step])))(rank, step)
        strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
    active = [each.is_active for each in optimizer._updates._sharded._active]
    slots = [optimizer.slots(variable) for variable in variables]
    return [variable.value.copy() for variable in variables], slots, active, optimizer.state()


def _alone(make, size, steps=3):
    assert mpidist.get_strategy().num_replicas_in_sync == 1
    variables = [mpidist.Variable(values) for values in _gradients(99)]
    optimizer = make()
    for step in range(steps):
        total = [sum(each) for each in zip(*[_gradients([rank, step]) for rank in range(size)], strict=True)]
        optimizer.apply_gradients(list(zip(total, variables, strict=True)))
    return [variable.value.copy() for variable in variables], [optimizer.slots(variable) for variable in variables]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_they_equal_one_rank_on_the_sums(make, size):
    expected, expected_slots = _alone(make, size)
    for values, slots, active, state in run_ranks(size, _train, make):
        assert active == [True]
        for got, wanted in zip(values, expected, strict=True):
            numpy.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)
        for got, wanted in zip(slots, expected_slots, strict=True):
            assert got.keys() == wanted.keys()
            for name in got:
                numpy.testing.assert_allclose(got[name], wanted[name], rtol=1e-12, atol=1e-13)
        assert state["iterations"] == 3


@pytest.mark.parametrize(
    "elements, algorithm",
    [
        *((3, algorithm) for algorithm in ("shared_memory", "two_level", "auto")),
        *(((1 << 13) + 3, algorithm) for algorithm in ("shared_memory", "auto")),  # many segments already
        ((1 << 16) + 3, "two_level"),
    ],
)
def test_a_rank_may_own_nothing_of_some_span(elements, algorithm, monkeypatch):
    """Fewer elements of a dtype than ranks, or of the last segment."""
    monkeypatch.setenv("MPIDIST_ALGORITHM", algorithm)

    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            long, short = mpidist.Variable(numpy.zeros(elements, "f4")), mpidist.Variable(0.0, dtype="float64")
            optimizer = SGD(1.0, momentum=0.5)
        buffers = strategy.extended.gradient_buffers([long, short])
        buffers[0][...], buffers[1][...] = 1, 1
        for gradients in ([numpy.ones(elements, "f4"), numpy.ones(())], buffers):
            strategy.run(lambda given=gradients: optimizer.apply_gradients(zip(given, (long, short), strict=True)))
        slots = optimizer.state()
        return set(long.value), float(short.value), set(slots["0/momentum"]), float(slots["1/momentum"])

    for found in run_ranks(8, run, hosts=["a"] * 4 + ["b"] * 4 if algorithm == "two_level" else None):
        assert found == ({-20.0}, -20.0, {-12.0}, -12.0)


def test_of_a_dtype_there_are_empty_variables_only():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            some, none = mpidist.Variable(numpy.zeros(9, "f4")), mpidist.Variable(numpy.zeros((0, 3)))
            optimizer = SGD(1.0, momentum=0.5)
        for _ in range(2):
            pairs = [(numpy.ones(9, "f4"), some), (numpy.ones((0, 3)), none)]
            strategy.run(optimizer.apply_gradients, args=(pairs,))
        return set(some.value), none.shape

    assert run_ranks(3, run) == [({-7.5}, (0, 3))] * 3  # -3, and then -3 and half of -3 more


def test_two_nodes_of_two_ranks_do_it_too(monkeypatch):
    monkeypatch.setenv("MPIDIST_ALGORITHM", "two_level")
    expected, _ = _alone(OPTIMIZERS[2], 4)
    for values, _, active, _ in run_ranks(4, _train, OPTIMIZERS[2], hosts=["a", "a", "b", "b"]):
        assert active == [True]
        for got, wanted in zip(values, expected, strict=True):
            numpy.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)


def test_all_ranks_have_the_same_bits():
    results = run_ranks(3, _train, OPTIMIZERS[2])
    assert len({tuple(value.tobytes() for value in values) for values, _, _, _ in results}) == 1


def test_gradients_in_another_memory_order_are_taken_by_their_axes():
    def swapped(rank, step):
        return [numpy.array(each, order="F") for each in _gradients([rank, step])]

    expected, _ = _alone(OPTIMIZERS[1], 2)
    for values, _, _, _ in run_ranks(2, _train, OPTIMIZERS[1], 3, swapped):
        for got, wanted in zip(values, expected, strict=True):
            numpy.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(0.1, global_clipnorm=1.0),
        lambda: SGD(0.1, skip_nonfinite=True),
        lambda: mpidist.optimizers.LossScaleOptimizer(SGD(0.1)),
        lambda: mpidist.optimizers.LARS(0.1),
        lambda: mpidist.optimizers.LAMB(0.1),
    ],
)
def test_what_needs_whole_gradients_first_does_not_shard(make):
    for _, _, active, _ in run_ranks(2, _train, make):
        assert not any(active)


def test_a_setting_turns_it_off(monkeypatch):
    monkeypatch.setenv("MPIDIST_SHARDED_UPDATES", "0")
    for _, _, active, _ in run_ranks(2, _train, OPTIMIZERS[2]):
        assert not any(active)


def test_lists_that_share_variables_pass_the_slots_on():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            first, second = (mpidist.Variable(numpy.zeros(600), name=name) for name in "ab")
            optimizer = SGD(1.0, momentum=0.5)
        ones = numpy.ones(600)

        def step(*variables):
            strategy.run(lambda: optimizer.apply_gradients([(ones, variable) for variable in variables]))

        step(first, second)  # velocity -2 of both
        step(first)  # -3 of the first
        step(first, second)  # -3.5, -3
        return optimizer.slots(first)["momentum"].copy(), optimizer.slots(second)["momentum"].copy(), first.value[0]

    for first, second, value in run_ranks(2, run):
        numpy.testing.assert_array_equal(first, numpy.full(600, -3.5))
        numpy.testing.assert_array_equal(second, numpy.full(600, -3.0))
        assert value == -8.5


def test_lists_that_share_none_keep_their_slots_in_slices_side_by_side():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variables = [mpidist.Variable(numpy.zeros(600), name=name) for name in "abc"]
            optimizer = SGD(1.0, momentum=0.5)
        ones, active = numpy.ones(600), []

        def step(*which):
            pairs = [(ones, variables[each]) for each in which]
            strategy.run(lambda: optimizer.apply_gradients(pairs))
            active.append([each.is_active for each in optimizer._updates._sharded._active])

        step(0, 1)
        step(2)
        step(0, 1)  # as in a GAN with one optimizer: nothing moves from list to list
        step(1, 2)  # shares one with each of the others
        return active, [optimizer.slots(each)["momentum"][0] for each in variables]

    for active, velocities in run_ranks(2, run):
        assert active == [[True], [True, True], [True, True], [True]]
        assert velocities == [-3.0, -3.5, -3.0]


def test_state_saved_from_slices_is_restored_at_another_number_of_ranks():
    state = run_ranks(3, _train, OPTIMIZERS[2])[0][3]

    def go_on():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variables = [mpidist.Variable(values, name=f"v{n}") for n, values in enumerate(_gradients(99))]
            optimizer = OPTIMIZERS[2]()
        optimizer.restore(state)
        zeros = [numpy.zeros(shape) for shape in SHAPES]
        strategy.run(lambda: optimizer.apply_gradients(list(zip(zeros, variables, strict=True))))
        return optimizer.state()

    for found in run_ranks(2, go_on):
        assert found["iterations"] == 4
        for number in range(len(SHAPES)):
            numpy.testing.assert_allclose(found[f"{number}/momentum"], state[f"{number}/momentum"] * 0.9, rtol=1e-14)


def test_slices_stay_where_they_are_however_many_deadlines_other_calls_have():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        rank = strategy.extended.communicator.rank
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(600))
            optimizer = SGD(1.0, momentum=0.5)

        def step(seconds):
            options = mpidist.CommunicationOptions(timeout_seconds=seconds)
            mpidist.get_replica_context().all_reduce("sum", numpy.ones(3), options)
            optimizer.apply_gradients([(numpy.ones(600), variable)])

        for number in range(70):  # what is left of the time is one number more often than another
            strategy.run(step, args=(900.0 - (number if rank else number // 2),))
        return [each.is_active for each in optimizer._updates._sharded._active]

    assert run_ranks(2, run) == [[True]] * 2


def test_a_shape_that_differs_is_named_and_tears_nothing():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            length = 600 + strategy.extended.communicator.rank
            variable = mpidist.Variable(numpy.zeros(600), name="w")
            other = mpidist.Variable(numpy.zeros(700), name="other")
            optimizer = SGD(1.0)
        wanted = variable if length == 600 else other
        with pytest.raises(CollectiveMismatchError, match="'w'"):
            strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(wanted.shape), wanted)]))
        return variable.value.sum(), optimizer.iterations, len(_bound(strategy.extended.communicator))

    assert run_ranks(2, run) == [(0.0, 0, 0)] * 2


def test_an_error_in_the_middle_tears_the_variables_until_they_are_restored():
    class Breaks(SGD):
        def update_slice(self, parameter, gradient, slots, scratch, coefficients):
            raise FloatingPointError("boom")

    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(600), name="w")
            optimizer = Breaks(1.0)
        with pytest.raises((FloatingPointError, RankFailedError)):  # the other may have failed before
            strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(600), variable)]))
        with pytest.raises(TornVariableError, match="'w' is torn: an update of it ended with .*boom"):
            _ = variable.value
        variable.restore(numpy.ones(600))
        return variable.value.sum()

    assert run_ranks(2, run) == [600.0, 600.0]


def test_a_variable_that_comes_twice_is_refused_in_words():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable, optimizer = mpidist.Variable(numpy.zeros(600), name="w"), Adam(0.1)
        with pytest.raises(ValueError, match="variable 'w' has two gradients"):
            strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(600), variable)] * 2))
        return variable.value.sum(), optimizer.iterations

    assert run_ranks(2, run) == [(0.0, 0)] * 2


# -- what is bound for them --------------------------------------------------------------------------------------------


def _bound(communicator):
    """Return the updates that the table of bindings has."""
    return [each for each in communicator.bindings if isinstance(each, update.PlannedUpdate)]


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("hosts", ["aa", "aabb"])
def test_the_binding_of_an_update_dies_when_calls_have_not_used_it_and_the_slots_stay(hosts, monkeypatch):
    monkeypatch.setenv("MPIDIST_ALGORITHM", "two_level" if "b" in hosts else "shared_memory")

    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        communicator, ones = strategy.extended.communicator, numpy.ones(600)
        with strategy.scope():
            variable, optimizer = mpidist.Variable(numpy.zeros(600)), SGD(1.0, momentum=0.5)

        def step():
            strategy.run(lambda: optimizer.apply_gradients([(ones, variable)]))

        step()
        (known,) = map(ref, _bound(communicator))
        for _ in range(700):
            communicator.barrier()
        step()
        is_kept = known() is not None and _bound(communicator) == [known()]
        for _ in range(1300):
            communicator.barrier()
        is_gone, is_active = known() is None, [each.is_active for each in optimizer._updates._sharded._active]
        step()
        return (
            is_kept,
            is_gone,
            is_active,
            len(_bound(communicator)),
            set(variable.value),
            set(optimizer.slots(variable)["momentum"]),
        )

    size = len(hosts)  # velocities -1, -1.5 and -1.75 of each rank
    assert run_ranks(size, run, hosts=hosts) == [(True, True, [True], 1, {-4.25 * size}, {-1.75 * size})] * size


@pytest.mark.usefixtures("without_collector")
def test_an_optimizer_that_meets_ever_new_lists_keeps_as_few_bindings_as_the_table_does(monkeypatch):
    monkeypatch.setattr(plan_cache, "_LEAST_BYTES", 8 << 18)  # those of 7 short lists

    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        known, variables, optimizer = set(), [], SGD(1.0, momentum=0.5)
        for number in range(30):
            with strategy.scope():
                variables.append(mpidist.Variable(numpy.zeros(600 + number)))
            pairs = [(numpy.ones(600 + number), variables[-1])]
            for _ in range(2):
                strategy.run(optimizer.apply_gradients, args=(pairs,))
            known |= set(map(ref, _bound(strategy.extended.communicator)))
        alive = [each() for each in known if each() is not None]
        assert len(known) == 30 and set(alive) == set(_bound(strategy.extended.communicator))
        return len(alive) < 8, {float(each.value[0]) for each in variables}

    assert run_ranks(2, run) == [(True, {-5.0})] * 2


def test_optimizers_of_one_list_have_one_binding_and_slots_of_their_own():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable, optimizers = mpidist.Variable(numpy.zeros(600)), [SGD(1.0, momentum=0.5) for _ in range(2)]
        for factor in (1, 2):
            for number, optimizer in enumerate(optimizers):
                pairs = [(numpy.full(600, factor + number), variable)]
                strategy.run(optimizer.apply_gradients, args=(pairs,))
        slots = [set(optimizer.slots(variable)["momentum"].tolist()) for optimizer in optimizers]
        return len(_bound(strategy.extended.communicator)), slots

    assert run_ranks(2, run) == [(1, [{-5.0}, {-8.0}])] * 2  # -(1 / 2 + 2) and -(2 / 2 + 3) of each rank


@pytest.mark.usefixtures("without_collector")
def test_buffers_whose_gradients_were_applied_go_with_their_last_holder():
    def run():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        communicator = strategy.extended.communicator
        with strategy.scope():
            variable, optimizer = mpidist.Variable(numpy.zeros(600)), SGD(1.0)
        buffers = GradientBuffers(communicator, [(variable.name, variable.dtype, variable.shape)]).hand_out()
        known = list(map(ref, communicator.in_shared_memory.values()))
        buffers[0][...] = 1
        strategy.run(optimizer.apply_gradients, args=(list(zip(buffers, [variable], strict=True)),))
        (total,) = strategy.run(communicator.engine(), args=(buffers,))
        known += [ref(each) for result in known[0]()._results for each in [result, *result.reductions["sum"]]]
        values = set(variable.value.tolist()), set(total.tolist())
        del buffers, total
        return values, len(known), [each() for each in known if each() is not None]

    assert run_ranks(2, run) == [(({-2.0}, {2.0}), 3, [])] * 2
