"""Arrays in pretended device memory under real MPI, by a link and staged: every verb, every optimizer."""

from contextlib import nullcontext

import numpy
import pytest

import mpidist
from mpidist.arrays import as_host, is_device
from mpidist.testing.device import PretendedUpdate, on_device, pretended_device
from mpidist.world import world_communicator


@pytest.fixture(params=["linked", "staged"], autouse=True)
def device(request):
    world = mpidist.new_world(pytest.importorskip("mpi4py.MPI").COMM_WORLD)  # one that knows of no other device
    with pretended_device("" if request.param == "linked" else "there is none"), world:
        yield request.param
    world.close()


def test_short_and_long_lists_equal_those_of_the_host():
    communicator = world_communicator()
    rank = communicator.rank
    generator = numpy.random.default_rng(rank)
    shapes = [(3,), (200, 300), (), (0, 2), (1 << 18,), (5, 7)]
    given = [generator.integers(-9, 9, shape).astype(dtype) for shape in shapes for dtype in ("f4", "f8", "i4")]
    for op in ("sum", "mean", "max"):
        on_host = communicator.all_reduce_list(given, op)
        there = communicator.all_reduce_list([on_device(each) for each in given], op)
        assert all(map(is_device, there))
        for mine, expected in zip(there, on_host, strict=True):
            numpy.testing.assert_array_equal(as_host(mine), expected)


def test_the_other_collectives(device):
    communicator = world_communicator()
    rank, size = communicator.rank, communicator.size
    ranks = [float(other) for other in range(size) for _ in range(other + 1)]
    joined = communicator.all_gather(on_device(numpy.full((rank + 1, 70_000), rank, "f4")))
    assert as_host(joined)[:, 0].tolist() == ranks
    gathered = communicator.gather(on_device(numpy.full((2, rank + 1), rank, "f2")), root=0, axis=1)
    assert as_host(gathered)[1].tolist() == ranks if rank == 0 else gathered is None
    table = [[(giver + to) % 3 for to in range(size)] for giver in range(size)]
    given = numpy.repeat(rank + 10 * numpy.arange(size), table[rank])
    rows, splits = communicator.all_to_all(on_device(given), table[rank])
    assert as_host(rows).tolist() == [giver + 10 * rank for giver in range(size) for _ in range(table[giver][rank])]
    assert splits == [table[giver][rank] for giver in range(size)]
    shared = on_device(numpy.full(100_000, rank, "f8"))
    communicator.broadcast(shared, root=size - 1)
    assert set(as_host(shared).tolist()) == {float(size - 1)}
    scalar = on_device(numpy.full((), rank, "f8"))
    communicator.broadcast(scalar, root=size - 1)
    assert scalar.shape == () and float(scalar) == size - 1
    share = communicator.reduce_scatter(on_device(numpy.arange(100_000.0)))
    start, stop = rank * 100_000 // size, (rank + 1) * 100_000 // size
    numpy.testing.assert_array_equal(as_host(share), size * numpy.arange(100_000.0)[start:stop])
    names = [name for link in communicator.devices.links() if not isinstance(link, str) for name in link.calls]
    if device == "linked" and size > 1:
        assert names == ["gather", "exchange", "exchange", "from_root", "from_root", "reduce_parts"]
    else:
        assert not names


def test_messages_from_one_rank_to_another():
    communicator = world_communicator()
    rank, size = communicator.rank, communicator.size
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (0, 3, 300_000):
        given = on_device(numpy.full(count, rank, "f4"))
        sending = communicator.point_to_point.start_send(given, right)
        found = communicator.receive(left, like=given)
        sending.wait()
        assert is_device(found)
        numpy.testing.assert_array_equal(as_host(found), numpy.full(count, left, "f4"))


def test_verbs_of_a_strategy():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    rank, size = world_communicator().rank, strategy.num_replicas_in_sync
    value = on_device(numpy.full(4, rank + 1.0))
    assert as_host(strategy.reduce("sum", value, axis=None)).tolist() == [size * (size + 1) / 2] * 4
    assert as_host(strategy.gather(value, axis=0)).tolist() == [1.0 + other for other in range(size) for _ in range(4)]

    def step():
        context = mpidist.get_replica_context()
        return context.all_reduce("mean", {"a": value, "b": on_device(numpy.full(2, rank))})

    found = strategy.run(step)
    assert as_host(found["a"]).tolist() == [(size + 1) / 2] * 4
    assert as_host(found["b"]).tolist() == [(size - 1) / 2] * 2
    assert float(strategy.reduce("mean", value, axis=0)) == (size + 1) / 2
    assert float(strategy.reduce("sum", value, axis=0)) == 4 * size * (size + 1) / 2


def test_rows_of_some_indices_and_a_sum_of_the_users_own():
    strategy = mpidist.MirroredStrategy(
        cross_device_ops=mpidist.ReductionToOneDevice(accumulation_fn=lambda values: sum(values[1:], values[0]))
    )
    rank, size = world_communicator().rank, world_communicator().size
    summed = strategy.reduce("sum", on_device(numpy.full(2, rank + 1.0)), axis=None)
    assert is_device(summed)
    assert as_host(summed).tolist() == [size * (size + 1) / 2] * 2
    rows = mpidist.IndexedSlices(on_device(numpy.full((1, 2), 1.0)), on_device(numpy.array([rank])), (size, 2))
    found = mpidist.MultiWorkerMirroredStrategy().run(lambda: mpidist.get_replica_context().all_reduce("sum", rows))
    assert as_host(found.indices).tolist() == list(range(size))
    assert as_host(found.values).tolist() == [[1.0, 1.0]] * size


def test_a_world_that_is_closed_ends_the_collectives_of_the_devices(device):
    comm = pytest.importorskip("mpi4py.MPI").COMM_WORLD
    world = mpidist.new_world(comm)
    with world:
        communicator = world_communicator()
        (result,) = communicator.all_reduce_list([on_device(numpy.ones(3))])
    links = [link for link in communicator.devices.links() if not isinstance(link, str)]
    assert len(links) == (1 if device == "linked" and comm.size > 1 else 0)
    world.close()
    assert all(link.is_closed for link in links)
    assert as_host(result).tolist() == [float(comm.size)] * 3


ROWS = numpy.random.default_rng(0).normal(size=(24, 5))
TARGETS = ROWS @ numpy.arange(5.0)


def _trained(make, rows, targets, start, strategy=None, steps=4):
    """Return the variable after some steps of a linear regression, whose loss is the mean over all 24 rows."""
    with strategy.scope() if strategy is not None else nullcontext():
        weights, optimizer = mpidist.Variable(start), make()

    def step():
        error = numpy.matmul(rows, weights.value) - targets
        optimizer.apply_gradients([(numpy.matmul(rows.T, error) * (2 / 24), weights)])

    for _ in range(steps):
        strategy.run(step) if strategy is not None else step()
    return weights, optimizer


@pytest.mark.parametrize("options", [{}, {"global_clipnorm": 0.5}, {"skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Ftrl", "LAMB", "LARS"])
def test_ranks_that_train_on_devices_equal_one_process_on_the_host(name, options):
    def make():
        return getattr(mpidist.optimizers, name)(0.05, **options)

    strategy = mpidist.MultiWorkerMirroredStrategy()
    rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync
    own = [on_device(ROWS[rank::size]), on_device(TARGETS[rank::size])]
    weights, _ = _trained(make, *own, on_device(numpy.full(5, float(rank))), strategy)
    expected, _ = _trained(make, ROWS, TARGETS, numpy.zeros(5))
    assert is_device(weights.value)
    numpy.testing.assert_allclose(as_host(weights.value), expected.value, rtol=1e-12, atol=1e-13)


RULES = {
    "sgd": lambda: mpidist.optimizers.SGD(0.1, clipvalue=0.5),
    "momentum": lambda: mpidist.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda: mpidist.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: mpidist.optimizers.Adam(0.01, global_clipnorm=3.0),
    "adamw": lambda: mpidist.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: mpidist.optimizers.RMSprop(0.01),
}
SHAPES = [((40, 300), "f8"), ((7,), "f8"), ((), "f8"), ((0, 3), "f8"), ((9, 4), "f4"), ((200, 100), "f4"), ((6,), "f2")]


def _updated(make, place, strategy=None, aggregates=True, rows=False):
    """Return variables of several dtypes after some steps, and the optimizer."""
    rank, size = (0, 1) if strategy is None else (strategy.extended.replica_id, strategy.num_replicas_in_sync)
    random = numpy.random.default_rng(3)
    with strategy.scope() if strategy is not None else nullcontext():
        variables = [mpidist.Variable(place(random.normal(size=shape).astype(dtype))) for shape, dtype in SHAPES]
        optimizer = make()
        optimizer.exclude_from_weight_decay(variables[1:3])

    def step(number):
        random = numpy.random.default_rng(number)
        shares = [random.integers(-8, 9, size=(12, *shape)) / 16 for shape, _ in SHAPES]
        parts = [share[rank::size] if aggregates else share for share in shares]
        gradients = [
            part.sum(axis=0).T.astype(dtype, order="C") for part, (_, dtype) in zip(parts, SHAPES, strict=True)
        ]
        found = [place(each).T for each in gradients]
        if rows:
            every = numpy.arange(40)
            found[0] = mpidist.IndexedSlices(place(parts[0].sum(axis=0)), place(every), (40, 300))
        optimizer.apply_gradients(zip(found, variables, strict=True), skip_gradients_aggregation=not aggregates)

    for number in range(3):
        strategy.run(step, args=(number,)) if strategy is not None else step(number)
    return variables, optimizer


@pytest.mark.parametrize("how", [{}, {"aggregates": False}, {"aggregates": False, "rows": True}], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_variables_of_several_dtypes_equal_those_of_one_process_on_the_host(name, how):
    """Gradients are transposed views of sixteenths, which are exact in each dtype."""
    variables, optimizer = _updated(RULES[name], on_device, mpidist.MultiWorkerMirroredStrategy(), **how)
    expected, other = _updated(RULES[name], numpy.array)
    for variable, wanted in zip(variables, expected, strict=True):
        precision = {"f8": 1e-12, "f4": 1e-5, "f2": 5e-3}[variable.dtype.str[1:]]
        assert is_device(variable.value)
        numpy.testing.assert_allclose(as_host(variable.value), wanted.value, rtol=precision, atol=precision)
        slots = zip(optimizer.slots(variable).values(), other.slots(wanted).values(), strict=True)
        for own, slot in slots:
            numpy.testing.assert_allclose(as_host(own), slot, rtol=precision, atol=precision)


class _Doubled(mpidist.optimizers.Adam):
    """A subclass with a rule of its own."""

    def update_slice(self, parameter, gradient, slots, scratch, coefficients):
        super().update_slice(parameter, gradient, slots, scratch, coefficients)
        parameter -= gradient


@pytest.mark.parametrize(
    "make, how, launched",
    [
        (RULES["sgd"], {}, [7]),
        (RULES["adamw"], {"rows": True}, [7]),
        (lambda: mpidist.optimizers.SGD(0.1), {"rows": True}, [6]),
        (RULES["rmsprop"], {}, []),
        (lambda: _Doubled(0.01), {}, []),
    ],
)
def test_what_is_one_launch(make, how, launched, monkeypatch):
    counts, run = [], PretendedUpdate.run

    def noted(self, rule, gradients, *given):
        counts.extend([len(gradients)] if rule.has_formula else [])
        return run(self, rule, gradients, *given)

    monkeypatch.setattr(PretendedUpdate, "run", noted)
    _updated(make, on_device, **how)
    assert counts == launched * 3


def _set_between_steps(place):
    """Return two variables, the first momentum of one, and what both are after their arrays were set anew."""
    variables = [mpidist.Variable(place(numpy.full(3, number + 1.0))) for number in range(2)]
    optimizer = mpidist.optimizers.Adam(0.1)

    def step(*members):
        optimizer.apply_gradients([(place(numpy.arange(3.0)), variables[each]) for each in members])

    step(0, 1)
    state = {key: as_host(each).copy() if "/" in key else each for key, each in optimizer.state().items()}
    step(0, 1)
    variables[0].assign(place(numpy.full(3, 5.0)))
    variables[1].restore(numpy.full(3, 7.0))
    optimizer.restore(state)
    step(1)
    step(0, 1)
    step(1, 0)
    return [each.value for each in variables] + list(optimizer.slots(variables[0]).values())


def test_what_is_set_between_steps_is_what_is_updated():
    for found, expected in zip(_set_between_steps(on_device), _set_between_steps(numpy.array), strict=True):
        numpy.testing.assert_allclose(as_host(found), as_host(expected), rtol=1e-14)


def test_a_gradient_of_the_host_is_refused_for_a_variable_on_a_device():
    weights, optimizer = mpidist.Variable(on_device(numpy.ones(3))), mpidist.optimizers.SGD(0.5)
    optimizer.apply_gradients([(on_device(numpy.ones(3)), weights)])
    with pytest.raises(TypeError, match="gradient for variable '.*' is a numpy array in host .* is a pretended array"):
        optimizer.apply_gradients([(numpy.ones(3), weights)])
    with pytest.raises(TypeError, match="gradient for variable '.*' is a numpy array in host .* is a pretended array"):
        optimizer.apply_gradients([(mpidist.IndexedSlices(numpy.ones(1), numpy.array([1]), (3,)), weights)])
    assert as_host(weights.value).tolist() == [0.5] * 3


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = mpidist.Variable(on_device(numpy.ones(3)))
        optimizer = mpidist.optimizers.SGD(0.5, skip_nonfinite=True)
    values = numpy.full(3, numpy.nan if strategy.extended.replica_id == 0 else 1.0)
    strategy.run(lambda: optimizer.apply_gradients([(on_device(values), weights)]))
    assert optimizer.skipped_steps == 1
    assert as_host(weights.value).tolist() == [1.0] * 3


def test_micro_batches_are_added_up():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = mpidist.Variable(on_device(numpy.ones(3)))
        optimizer = mpidist.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    for value in (1.0, 3.0):
        gradient = on_device(numpy.full(3, value))
        strategy.run(optimizer.apply_gradients, args=([(gradient, weights)],))
    assert as_host(weights.value).tolist() == [1.0 - 2.0 * strategy.num_replicas_in_sync] * 3


@pytest.mark.parametrize("saved_on", ["device", "host"])
def test_a_checkpoint_of_one_kind_of_memory_is_restored_into_the_other(saved_on, tmp_path):
    place = {"device": on_device, "host": numpy.array}
    strategy = mpidist.MultiWorkerMirroredStrategy()

    def make():
        return mpidist.optimizers.Adam(0.1)

    def data(kind):
        rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync
        return [place[kind](ROWS[rank::size]), place[kind](TARGETS[rank::size]), place[kind](numpy.zeros(5)), strategy]

    weights, optimizer = _trained(make, *data(saved_on))
    folder = world_communicator().exchange(str(tmp_path).encode())[0].decode()
    path = mpidist.Checkpoint(weights=weights, optimizer=optimizer).save(f"{folder}/c")
    other = "host" if saved_on == "device" else "device"
    again, restored = _trained(make, *data(other), steps=1)
    mpidist.Checkpoint(weights=again, optimizer=restored).restore(path)
    found = as_host(again.value) if other == "device" else again.value
    numpy.testing.assert_array_equal(found, as_host(weights.value) if saved_on == "device" else weights.value)
    assert is_device(again.value) == (other == "device")
    assert restored.iterations == 4
