"""Variables: how copies come into being, are written, and read; closed forms, and what TensorFlow was seen to do."""

from __future__ import annotations

import copy

import numpy
import pytest

import mpidist
from mpidist import context
from mpidist.errors import CollectiveMismatchError, TornVariableError
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.testing import run_ranks
from mpidist.variables import IndexedSlices, Variable
from tests.oracle.cases import cases

#: TensorFlow's cases of one write by two replicas, or across them.
WRITES = {name: case for name, case in cases("variables").items() if {"op", "context"} <= case["input"].keys()}


def on_replicas(size, fn, *args):
    """Return what ``fn(strategy, *args)`` returns in the scope of a strategy, by rank."""

    def in_scope():
        with MirroredStrategy().scope() as strategy:
            return fn(strategy, *args)

    return run_ranks(size, in_scope)


def write_and_read(strategy, given):
    rank = strategy.extended.replica_id
    variable = Variable(given["initial"], synchronization=given["synchronization"], aggregation=given["aggregation"])
    write = getattr(variable, given["op"])
    if given["context"] == "replica":
        strategy.run(lambda: write(given["values"][rank]))
    else:
        write(given["value"])
    seen = {"components": float(variable.storage), "read_in_replica": float(strategy.run(lambda: variable.value))}
    try:
        seen["read_cross_replica"] = float(variable.value)
    except ValueError as error:
        seen["read_cross_replica"] = error
    return seen


@pytest.mark.parametrize("name", [name for name in WRITES if "raises" not in WRITES[name]["expected"]])
def test_writes_as_tensorflow_does(name):
    expected = WRITES[name]["expected"]
    for rank, seen in enumerate(on_replicas(2, write_and_read, WRITES[name]["input"])):
        assert seen["components"] == expected["components"][rank]
        assert seen["read_in_replica"] == expected["read_in_replica"][rank]
        if isinstance(expected["read_cross_replica"], dict):
            assert isinstance(seen["read_cross_replica"], ValueError)
        elif WRITES[name]["input"]["aggregation"] == "NONE":
            assert seen["read_cross_replica"] == expected["components"][rank]  # local and free: this rank's copy
        else:
            assert seen["read_cross_replica"] == expected["read_cross_replica"]


@pytest.mark.parametrize("name", [name for name in WRITES if "raises" in WRITES[name]["expected"]])
def test_refuses_what_tensorflow_refuses(name):
    with pytest.raises(ValueError):
        on_replicas(2, write_and_read, WRITES[name]["input"])


def test_the_chiefs_initial_value_is_everybodys():
    def fn(strategy):
        rank = strategy.extended.replica_id
        by_value = Variable(numpy.full((2, 3), 100.0 + rank))
        by_function = Variable(lambda: numpy.arange(3) + rank)
        inside_run = strategy.run(lambda: Variable(7 + rank))
        return by_value.value.copy(), by_function.value.copy(), inside_run.value.copy()

    for by_value, by_function, inside_run in on_replicas(3, fn):
        numpy.testing.assert_array_equal(by_value, numpy.full((2, 3), 100.0))
        numpy.testing.assert_array_equal(by_function, numpy.arange(3))
        assert inside_run == 7


@pytest.mark.parametrize(
    "initial_value_fn",
    [lambda rank: numpy.zeros(2 + (rank == 1)), lambda rank: numpy.zeros(2, dtype=["float32", "float64"][rank == 1])],
    ids=["shape", "dtype"],
)
def test_ranks_that_create_different_variables_are_told(initial_value_fn):
    def fn(strategy):
        return Variable(initial_value_fn(strategy.extended.replica_id), name="kernel")

    with pytest.raises(CollectiveMismatchError, match="(?s)'kernel'.*rank 1 ") as raised:
        on_replicas(3, fn)
    assert set(raised.value.rank_errors) == {0, 1, 2}


def test_a_variable_created_by_one_name_here_and_another_there():
    def fn(strategy):
        return Variable(0.0, name=f"bias_{strategy.extended.replica_id}")

    with pytest.raises(CollectiveMismatchError, match="'bias_0'"):
        on_replicas(2, fn)


def test_names_are_unique():
    def fn(strategy):
        given = [None, None, "w", "w_1", "w", "w", None]
        return [Variable(0.0, name=name).name for name in given]

    expected = ["Variable", "Variable_1", "w", "w_1", "w_2", "w_3", "Variable_2"]
    assert on_replicas(2, fn) == [expected, expected]


def test_dtypes_are_tensorflows():
    assert Variable(1.0).dtype == "float32"
    assert Variable([[1, 2]]).dtype == "int32"
    assert Variable(True).dtype == "bool"
    assert Variable(numpy.zeros(2)).dtype == "float64"
    assert Variable([1, 2], dtype="float16").dtype == "float16"


def test_the_value_is_a_live_view_that_cannot_be_written():
    variable = Variable(numpy.zeros(3))
    value = variable.value
    assert numpy.shares_memory(value, variable.storage)
    with pytest.raises(ValueError, match="read-only"):
        value[0] = 1
    variable.assign_add([1.0, 2.0, 3.0])
    numpy.testing.assert_array_equal(value, [1, 2, 3])
    numpy.testing.assert_array_equal(numpy.asarray(variable) * 2, [2, 4, 6])
    assert variable.shape == (3,) and "Variable" in repr(variable)


def test_the_initial_value_is_copied():
    initial = numpy.zeros((2, 2)).T
    variable = Variable(initial)
    initial[:] = 1
    assert variable.value.sum() == 0 and variable.storage.flags.c_contiguous


def test_assign_checks_shape_and_kind():
    variable = Variable([1, 2], name="counts")
    with pytest.raises(ValueError, match=r"'counts' has shape \(2,\), got a value of shape \(3,\)"):
        variable.assign([1, 2, 3])
    with pytest.raises(TypeError, match="'counts' is int32, got a value of dtype float64"):
        variable.assign([0.5, 0.5])
    assert variable.assign([3, 4]) is variable
    numpy.testing.assert_array_equal(variable.value, [3, 4])


def test_arguments_that_make_no_sense():
    with MirroredStrategy().scope():
        with pytest.raises(ValueError, match="`NONE` variable synchronization.*for variable: w"):
            Variable(0.0, synchronization=VariableSynchronization.NONE, name="w")
        with pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype.*variable None is int32"):
            Variable(0, aggregation=VariableAggregation.MEAN)
        with pytest.raises(ValueError, match="is not a valid VariableAggregation; it is one of NONE, SUM"):
            Variable(0, aggregation="MAX")


def test_outside_of_all_scopes_a_variable_is_just_a_variable():
    variable = Variable(4, synchronization="NONE", aggregation="MEAN")
    assert variable.assign_add(3).value == 7
    on_read = Variable(4.0, synchronization="ON_READ", aggregation="SUM")

    def fn():
        with MirroredStrategy().scope() as strategy:
            return float(on_read.value), strategy.run(lambda: float(on_read.value))

    assert run_ranks(1, fn) == [(4.0, 4.0)]


def test_trainable():
    assert Variable(0.0).trainable
    assert not Variable(0.0, trainable=False).trainable
    assert not Variable(0.0, synchronization="ON_READ").trainable
    assert Variable(0.0, synchronization="ON_READ", trainable=True).trainable


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_aggregations_in_closed_form(size):
    def fn(strategy):
        rank = strategy.extended.replica_id
        variables = {name: Variable(10.0, aggregation=name) for name in VariableAggregation.__members__}
        strategy.run(lambda: [variable.assign_add(rank + 1.0) for variable in variables.values()])
        return {name: float(variable.value) for name, variable in variables.items()}

    total = size * (size + 1) / 2
    for rank, seen in enumerate(on_replicas(size, fn)):
        assert seen == {
            "NONE": 10 + rank + 1,
            "SUM": 10 + total,
            "MEAN": pytest.approx(10 + total / size),
            "ONLY_FIRST_REPLICA": 11,
        }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sum_on_read_keeps_the_total_of_integers_as_tensorflow_does(size):
    def fn(strategy):
        variable = Variable(0, synchronization="ON_READ", aggregation="SUM")
        variable.assign(7)
        seen = [int(variable.value)]
        variable.assign(-7)
        return [*seen, int(variable.value)]

    assert on_replicas(size, fn) == [[7 // size * size, -(7 // size) * size]] * size


def test_a_variable_remembers_its_strategy_outside_of_the_scope():
    def fn():
        with MirroredStrategy().scope() as strategy:
            variable = Variable(0.0, aggregation="SUM")
        strategy.run(lambda: variable.assign_add(1.0))
        inside = float(variable.value)
        variable.assign(5.0)
        return inside, float(variable.value), variable.strategy is strategy

    assert run_ranks(3, fn) == [(3.0, 5.0, True)] * 3


@pytest.mark.parametrize(
    ("synchronization", "use"),
    [
        ("ON_WRITE", lambda variable: variable.assign_add(numpy.ones(2))),
        ("ON_WRITE", lambda variable: variable.scatter_add(IndexedSlices(numpy.ones(1), numpy.array([0])))),
        ("ON_READ", lambda variable: variable.value),
    ],
    ids=["assign_add", "scatter_add", "value"],
)
def test_replicas_of_another_strategy_are_refused_for_their_values_would_not_be_joined(synchronization, use):
    def fn():
        own, other = MirroredStrategy(), MirroredStrategy()
        with own.scope():
            variable = Variable(numpy.zeros(2), name="v", aggregation="SUM", synchronization=synchronization)
        with pytest.raises(RuntimeError, match="Mixing different .*'v' was created .* is used in `run`"):
            other.run(use, args=(variable,))
        own.run(lambda: variable.assign_add(numpy.ones(2)))
        return variable.value.tolist()

    assert run_ranks(2, fn) == [[2, 2]] * 2


def test_a_variable_made_outside_belongs_to_its_rank():
    def fn():
        variable = Variable(0.0, aggregation="SUM")
        strategy = MirroredStrategy()
        strategy.run(lambda: variable.assign_add(context.get_replica_context().replica_id_in_sync_group + 1.0))
        return float(variable.value)

    assert run_ranks(2, fn) == [1.0, 2.0]


def torn():
    variable = Variable(numpy.zeros(3), name="kernel")
    variable._torn = "rank 1: KeyboardInterrupt in apply_gradients"
    return variable


@pytest.mark.parametrize(
    "use",
    [
        lambda variable: variable.value,
        lambda variable: variable.storage,
        lambda variable: variable + 1,
        lambda variable: variable.numpy(),
        lambda variable: variable.assign_add(numpy.ones(3)),
        lambda variable: float(variable[0]),
    ],
)
def test_a_torn_variable_has_no_value(use):
    with pytest.raises(TornVariableError, match="'kernel.*' is torn: rank 1: KeyboardInterrupt.*assign.*checkpoint"):
        use(torn())
    assert "torn" in repr(torn())


@pytest.mark.parametrize("make_whole", [lambda v: v.assign(numpy.ones(3)), lambda v: v.restore(numpy.ones(3))])
def test_a_torn_variable_is_whole_again_when_all_of_it_is_set(make_whole):
    variable = torn()
    make_whole(variable)
    assert variable.value.tolist() == [1, 1, 1]


# -- rows -------------------------------------------------------------------------------------------------------------


def scattered(verb, aggregation, rows_fn, size=2, initial=2.0):
    """Return by rank what every copy holds after each replica has written its rows."""

    def fn(strategy):
        rank = strategy.extended.replica_id
        variable = Variable(numpy.full(3, initial), aggregation=aggregation)
        strategy.run(lambda: getattr(variable, verb)(IndexedSlices(*rows_fn(rank))))
        return variable.storage.tolist()

    return on_replicas(size, fn)


@pytest.mark.parametrize(
    ("verb", "aggregation", "expected"),
    [
        ("scatter_add", "SUM", [3.0, 7.0, 2.0]),  # row 0 gets 1, row 1 gets 1 + 1 and 1 + 2
        ("scatter_add", "MEAN", [2.5, 4.5, 2.0]),
        ("scatter_add", "ONLY_FIRST_REPLICA", [3.0, 3.0, 2.0]),
        ("scatter_sub", "SUM", [1.0, -3.0, 2.0]),
        ("scatter_mul", "SUM", [2.0, 2.0 * 1 * 2 * 2, 2.0]),
        ("scatter_div", "SUM", [2.0, 0.5, 2.0]),
        ("scatter_min", "ONLY_FIRST_REPLICA", [1.0, 1.0, 2.0]),
        ("scatter_max", "ONLY_FIRST_REPLICA", [2.0, 2.0, 2.0]),
        ("scatter_update", "ONLY_FIRST_REPLICA", [1.0, 1.0, 2.0]),
    ],
)
def test_rows_of_replicas_are_aggregated_then_written_to_every_copy(verb, aggregation, expected):
    rows = [([1.0, 1.0], [0, 1]), ([2.0, 2.0], [1, 1])]
    assert scattered(verb, aggregation, lambda rank: rows[rank]) == [expected] * 2


@pytest.mark.parametrize("verb", ["scatter_add", "scatter_update", "scatter_max"])
def test_without_an_aggregation_each_copy_gets_its_own_rows(verb):
    first, second = scattered(verb, "NONE", lambda rank: ([rank + 5.0], [rank]), initial=0.0)
    assert (first, second) == ([5.0, 0.0, 0.0], [0.0, 6.0, 0.0])


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN"])
def test_across_replicas_rows_are_written_as_they_are(aggregation):
    def fn(strategy):
        variable = Variable(numpy.zeros((3, 2)), aggregation=aggregation)
        return variable.scatter_add(IndexedSlices([[1.0, 2.0]], [1])).numpy().tolist()

    assert on_replicas(2, fn) == [[[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]] * 2


@pytest.mark.parametrize("verb", ["scatter_min", "scatter_max", "scatter_update"])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_there_are_no_sums_of_least_and_last_rows(verb, aggregation):
    with pytest.raises(NotImplementedError, match=f"{verb} is only supported for .*VariableAggregation.{aggregation}"):
        scattered(verb, aggregation, lambda rank: ([1.0], [0]))


@pytest.mark.parametrize("verb", ["scatter_mul", "scatter_div"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_factors_of_replicas_have_no_mean(verb, size):
    """Divided by the number of replicas, a factor of 3 from each of three would leave a row as it is."""
    with pytest.raises(NotImplementedError, match=f"{verb} in a replica has no mean.*ONLY_FIRST_REPLICA") as raised:
        scattered(verb, "MEAN", lambda rank: ([3.0], [0]), size)
    assert set(raised.value.rank_errors) == {*range(size)}

    def across(strategy):
        variable = Variable(numpy.full(2, 2.0), aggregation="MEAN")
        return getattr(variable, verb)(IndexedSlices([4.0], [0])).numpy().tolist()

    assert on_replicas(size, across) == [[8.0 if verb == "scatter_mul" else 0.5, 2.0]] * size


def test_what_scatter_refuses():
    def fn(strategy):
        variable = Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        with pytest.raises(NotImplementedError, match="scatter_add is not supported .* synchronized on read"):
            variable.scatter_add(IndexedSlices([1.0], [0]))

    on_replicas(1, fn)
    variable = Variable(numpy.zeros((3, 2), "float32"))
    with pytest.raises(TypeError, match="sparse_delta is not IndexedSlices: scatter_add got list"):
        variable.scatter_add([1.0])
    with pytest.raises(ValueError, match="from 3 to 3 are outside"):
        variable.scatter_add(IndexedSlices(numpy.ones((1, 2)), [3]))
    with pytest.raises(TypeError, match="is float32, got a value of dtype complex128"):
        variable.scatter_add(IndexedSlices(numpy.ones((1, 2), complex), [0]))
    assert variable.scatter_update(IndexedSlices([[1, 2], [3, 4]], [1, 1])).value.tolist() == [[0, 0], [3, 4], [0, 0]]


# -- in `update` ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("inside_run", [True, False])
def test_in_update_every_copy_is_read_and_written_as_it_is(synchronization, inside_run):
    def fn(strategy):
        rank = strategy.extended.replica_id
        variable = Variable(10.0, synchronization=synchronization, aggregation="SUM")

        def update():
            return strategy.extended.update(variable, lambda v: float(v.assign_add(rank + 1.0).value), group=False)

        seen = strategy.run(update) if inside_run else update()
        return seen, float(variable.storage)

    assert on_replicas(3, fn) == [((11.0 + rank,), 11.0 + rank) for rank in range(3)]


def test_update_refuses_foreign_variables():
    foreign = Variable(0.0)

    def fn(strategy):
        with pytest.raises(ValueError, match="created in the scope of <MirroredStrategy"):
            strategy.extended.update(foreign, lambda v: v)

    on_replicas(1, fn)


def test_values_that_are_copies():
    variable = Variable([1.0])
    copy = variable.read_value()
    variable.assign([2.0])
    assert copy.tolist() == [1.0]


# -- deep copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [
    mpidist.MirroredStrategy,
    mpidist.experimental.CentralStorageStrategy,
    mpidist.get_strategy,
])  # fmt: skip
def test_a_deep_copy_is_a_variable_of_its_own(size, kind):
    def fn():
        strategy = kind()
        with strategy.scope():
            v = Variable(numpy.arange(3.0), name="v", trainable=False, aggregation="SUM")
        v.assign_add(numpy.ones(3))
        new, same = copy.deepcopy([v, v])
        assert new is same and new.name.startswith("v_") and new.strategy is strategy and type(new) is type(v)
        assert (new.trainable, new.aggregation, new.synchronization) == (v.trainable, v.aggregation, v.synchronization)
        found = new.value.tolist()
        new.assign(numpy.zeros(3))
        v.assign_add(numpy.ones(3))
        return found, new.value.tolist(), v.value.tolist()

    assert run_ranks(size, fn) == [([1.0, 2.0, 3.0], [0.0] * 3, [2.0, 3.0, 4.0])] * size


def test_a_deep_copy_keeps_copies_that_differ():
    def fn(strategy):
        v = Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        strategy.run(lambda: v.assign(float(strategy.extended.replica_id + 1)))
        new = copy.deepcopy(v)
        v.assign(0.0)
        return strategy.run(lambda: float(new.value)), float(new.value), new.trainable

    assert on_replicas(2, fn) == [(1.0, 3.0, False), (2.0, 3.0, False)]


def test_a_torn_variable_is_not_copied():
    variable = Variable(0.0)
    variable.tear("a test")
    with pytest.raises(TornVariableError):
        copy.deepcopy(variable)


def test_ranks_that_copy_other_variables_are_told():
    def fn(strategy):
        variables = [Variable(0.0, name="a"), Variable(numpy.zeros(2), name="b")]
        copy.deepcopy(variables[strategy.extended.replica_id])

    with pytest.raises(CollectiveMismatchError, match="a_1.*b_1|b_1.*a_1"):
        on_replicas(2, fn)


@pytest.mark.parametrize("meet", [
    lambda optimizer, v: optimizer.apply_gradients([(numpy.float32(1), v)]),
    lambda optimizer, v: optimizer.exclude_from_weight_decay([v]),
])  # fmt: skip
def test_an_optimizer_is_copied_as_long_as_it_has_met_no_variables(meet):
    def fn(strategy):
        v, optimizer = Variable(0.0), mpidist.optimizers.Adam(0.5)
        other = copy.deepcopy(optimizer)
        other.learning_rate = 0.25
        strategy.run(meet, args=(optimizer, v))
        with pytest.raises(TypeError, match="this Adam has met variables.*restore"):
            copy.deepcopy(optimizer)
        return optimizer.learning_rate, other.learning_rate, other.iterations

    assert on_replicas(2, fn) == [(0.5, 0.25, 0)] * 2


# -- initial values that are none -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, lambda: None])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_none_is_no_initial_value(value, dtype):
    with pytest.raises(ValueError, match="variable 'w' needs an initial value, got None"):
        Variable(value, name="w", dtype=dtype)


NO_NUMBERS = {
    "text": "abc",
    "text that looks like a number": "1.5",
    "bytes": b"x",
    "a None among numbers": [1.0, None],
    "an object": object(),
    "a dict": {"a": 1.0},
    "a date": numpy.datetime64("2020"),
    "a record": numpy.zeros(2, [("a", "f4")]),
}


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_variables_hold_numbers_on_any_number_of_ranks(value, dtype):
    def on_rank():
        strategy = MirroredStrategy()
        with strategy.scope(), pytest.raises(TypeError, match="variable 'w' holds numbers .*, got dtype"):
            Variable(value, name="w", dtype=dtype)
        return float(strategy.reduce("sum", 1.0, axis=None))  # and the ranks are still in step

    assert run_ranks(1, on_rank) == [1.0]
    assert run_ranks(2, on_rank) == [2.0, 2.0]


@pytest.mark.parametrize("dtype", ["S3", "U3", object, "M8[s]"])
def test_a_dtype_without_numbers_is_refused(dtype):
    with pytest.raises(TypeError, match="holds numbers or truth values"):
        Variable([1.5], dtype=dtype)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "complex64"])
def test_numbers_of_any_kind_are_held(dtype):
    assert Variable([1, 0], dtype=dtype).value.tolist() == [1, 0]
    assert Variable(numpy.ones(2, dtype)).dtype == dtype


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_floats_of_ml_dtypes_are_numbers(name):
    dtype = getattr(pytest.importorskip("ml_dtypes"), name)
    assert Variable(numpy.ones(2, dtype)).dtype == dtype
