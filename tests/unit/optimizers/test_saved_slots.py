"""Slots go to the variable for which they were saved: by its path in a checkpoint, else by its name; or nowhere."""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist import optimizers
from mpidist.collectives.reductions import update
from mpidist.errors import CheckpointError
from mpidist.testing import run_ranks
from tests.unit.parameter_server.jobs import one_worker

#: After a step with the gradient -(n + 1), a momentum of n + 1.
SGD = {"learning_rate": 1.0, "momentum": 0.5}

#: How a strategy comes to its replicas, and whether slots lie in slices there.
STRATEGIES = {
    "whole": lambda fn: run_ranks(2, lambda: fn(mpidist.MultiWorkerMirroredStrategy()))[1],
    "slices": lambda fn: run_ranks(2, lambda: fn(mpidist.MultiWorkerMirroredStrategy()))[1],
    "one copy": lambda fn: run_ranks(2, lambda: fn(mpidist.CentralStorageStrategy()))[1],
    "servers": lambda fn: one_worker(fn, 2),
}


class Script:
    """Variables of one shape, made in one order and listed in another, and an optimizer that updates them.

    Parameters
    ----------
    made, listed : sequence of int
        Of variables 0, 1, ...
    named : bool
        Whether they have names, or are told apart by their order of creation.
    """

    def __init__(self, strategy, made, listed, named=True, make=lambda: optimizers.SGD(**SGD)):
        self.strategy, self.replicas = strategy, strategy.num_replicas_in_sync
        with strategy.scope():
            variables = {n: mpidist.Variable(numpy.zeros(3), name=f"layer{n}" if named else None) for n in made}
            self.optimizer = make()
        self.variables, self.listed = variables, listed
        self.model = {f"key{n}": variables[n] for n in listed}

    def step(self, gradient_of):
        pairs = [(numpy.full(3, gradient_of(n) / self.replicas), self.variables[n]) for n in self.listed]
        self.strategy.run(self.optimizer.apply_gradients, args=(pairs,))
        return self

    def momenta(self):
        return {n: float(self.optimizer.slots(each)["momentum"][0]) for n, each in self.variables.items()}


ORDERS = st.integers(2, 5).flatmap(lambda count: st.tuples(*[st.permutations(range(count))] * 4))


@pytest.mark.parametrize("how", STRATEGIES)
@settings(max_examples=12, deadline=None)
@given(orders=ORDERS, named=st.booleans(), has_model=st.booleans(), met=st.booleans())
def test_whatever_the_order_slots_go_to_their_variable(how, orders, named, has_model, met):
    made, listed, made_again, listed_again = orders
    if not named and not has_model:
        made_again = made  # all that is known of them

    def save(strategy):
        script = Script(strategy, made, listed, named).step(lambda n: -(n + 1))
        parts = {"model": script.model} if has_model else {}
        mpidist.Checkpoint(**parts, optimizer=script.optimizer).save(path)

    def go_on(strategy):
        script = Script(strategy, made_again, listed_again, named)
        if met:  # it has slots of its own already
            script.step(lambda n: 100.0)
        parts = {"model": script.model} if has_model else {}
        mpidist.Checkpoint(**parts, optimizer=script.optimizer).restore(path)
        return script.step(lambda n: 0.0).momenta(), script.optimizer.iterations

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "c.h5"
        patch.setattr(update, "LEAST_BYTES", 1 if how == "slices" else 1 << 40)
        STRATEGIES[how](save)
        assert STRATEGIES[how](go_on) == ({n: 0.5 * (n + 1) for n in made}, 2)


@settings(max_examples=20, deadline=None)
@given(orders=ORDERS, named=st.booleans(), has_model=st.booleans())
def test_whatever_the_order_accumulated_gradients_go_to_their_variable(orders, named, has_model):
    made, listed, made_again, listed_again = orders
    if not named and not has_model:
        made_again = made

    def make():
        return optimizers.SGD(1.0, gradient_accumulation_steps=2)

    def save():
        script = Script(mpidist.MultiWorkerMirroredStrategy(), made, listed, named, make).step(lambda n: -2.0 * n)
        parts = {"model": script.model} if has_model else {}
        mpidist.Checkpoint(**parts, optimizer=script.optimizer).save(path)

    def go_on(again):
        script = Script(mpidist.MultiWorkerMirroredStrategy(), made_again, listed_again, named, make)
        parts = {"model": script.model} if has_model else {}
        checkpoint = mpidist.Checkpoint(**parts, optimizer=script.optimizer)
        checkpoint.restore(path)
        if again:  # what nobody has taken yet is saved as it was
            checkpoint.restore(checkpoint.save(path.with_name("again.h5")))
        script.step(lambda n: 0.0)
        return {n: float(each.value[0]) for n, each in script.variables.items()}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.h5"
        run_ranks(2, save)
        for again in (False, True):
            assert run_ranks(1, go_on, again) == [{n: float(n) for n in made}]


def test_a_variable_made_before_does_not_shift_the_others():
    """Names by default count all variables of a script, those of no optimizer too."""

    def state():
        return (
            Script(mpidist.OneDeviceStrategy("cpu:0"), [0, 1], [0, 1], named=False)
            .step(lambda n: -(n + 1))
            .optimizer.state()
        )

    def go_on(saved):
        strategy = mpidist.OneDeviceStrategy("cpu:0")
        with strategy.scope():
            mpidist.Variable(0, name=None)  # a counter: the others are Variable_1 and Variable_2 now
        script = Script(strategy, [0, 1], [1, 0], named=False)
        script.optimizer.restore(saved)
        return script.step(lambda n: 0.0).momenta()

    assert go_on(state()) == {0: 0.5, 1: 1.0}


def refused(script, state, match):
    """Refuse a state, at once or at the first update, with nothing changed."""
    with pytest.raises(ValueError, match=match):
        script.optimizer.restore(state)
        script.step(lambda n: 1.0)
    assert all(not each.value.any() for each in script.variables.values())


def script_of(made, **options):
    return Script(mpidist.OneDeviceStrategy("cpu:0"), made, made, **options)


def test_what_cannot_be_told_is_refused():
    named = script_of([0, 1]).step(lambda n: -1.0).optimizer.state()
    refused(script_of([0, 2]), named, "'layer1' of shape .*not here.*none for 'layer2'.*Save the variables in the same")
    unnamed = script_of([0, 1], named=False).step(lambda n: -1.0).optimizer.state()
    refused(script_of([0, 1, 2], named=False), unnamed, "cannot be told which variable is which")
    refused(script_of([0], named=False), unnamed, "cannot be told which variable is which")
    refused(script_of([0, 1]), unnamed, "cannot be told which variable is which")


def test_new_variables_begin_anew_and_variables_that_are_not_updated_keep_their_slots():
    state = script_of([0, 1]).step(lambda n: -(n + 1)).optimizer.state()
    more = script_of([0, 1, 2])
    more.optimizer.restore(state)
    assert more.step(lambda n: 0.0).momenta() == {0: 0.5, 1: 1.0, 2: 0.0}
    fewer = script_of([1])
    fewer.optimizer.restore(state)
    assert fewer.step(lambda n: 0.0).momenta() == {1: 1.0}
    saved = fewer.optimizer.state()
    assert dict(zip(saved["slot_variables"], (saved["0/momentum"][0], saved["1/momentum"][0]), strict=True)) == {
        "layer1": 1.0,
        "layer0": 1.0,
    }


def test_lists_updated_by_turns_find_their_slots():
    def make(strategy):
        with strategy.scope():
            return [mpidist.Variable(numpy.zeros(3), name=name) for name in "abcd"], optimizers.SGD(**SGD)

    variables, optimizer = make(mpidist.OneDeviceStrategy("cpu:0"))
    for number, each in enumerate(variables):
        optimizer.apply_gradients([(numpy.full(3, -number), each)], skip_gradients_aggregation=True)
    state = optimizer.state()
    (a, b, c, d), optimizer = make(mpidist.OneDeviceStrategy("cpu:0"))
    optimizer.restore(state)
    for pair in ((d, b), (c, a)):
        optimizer.apply_gradients([(numpy.zeros(3), each) for each in pair], skip_gradients_aggregation=True)
    assert [float(optimizer.slots(each)["momentum"][0]) for each in (a, b, c, d)] == [0.0, 0.5, 1.0, 1.5]


FAMILIES = {
    "Adam": lambda: optimizers.Adam(0.1),
    "AdamW": lambda: optimizers.AdamW(0.1),
    "LAMB": lambda: optimizers.LAMB(0.1),
    "RMSprop": lambda: optimizers.RMSprop(0.1),
    "RMSprop with momentum": lambda: optimizers.RMSprop(0.1, momentum=0.5),
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD with momentum": lambda: optimizers.SGD(0.1, momentum=0.5),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
}


@pytest.mark.parametrize("later", FAMILIES)
@pytest.mark.parametrize("first", FAMILIES)
def test_the_state_of_another_optimizer_is_refused(first, later):
    state = script_of([0, 1], make=FAMILIES[first]).step(lambda n: -1.0).optimizer.state()
    script = script_of([0, 1], make=FAMILIES[later])
    if first == later:
        script.optimizer.restore(state)
        assert script.optimizer.iterations == 1
        return
    same_class = first.split()[0] == later.split()[0]
    refused(
        script, state, r"slots \[.*\] were saved, this" if same_class else "the state of .* was saved, this optimizer"
    )
    assert script.optimizer.iterations == 0


def earlier(state):
    """Return a state as earlier versions saved it."""
    old = {key: value for key, value in state.items() if key not in ("class", "slot_names", "slot_paths")}
    return {**old, "slot_variables": "\n".join(state["slot_variables"])} if "slot_variables" in state else old


def test_states_of_earlier_versions_are_matched_by_name():
    state = earlier(script_of([0, 1]).step(lambda n: -(n + 1)).optimizer.state())
    script = Script(mpidist.OneDeviceStrategy("cpu:0"), [1, 0], [1, 0])
    script.optimizer.restore(state)
    assert script.step(lambda n: 0.0).momenta() == {0: 0.5, 1: 1.0}
    refused(script_of([0, 1], make=FAMILIES["RMSprop"]), state, r"slots \['momentum'\] were saved, this RMSprop has")
    plain = earlier(script_of([0, 1], make=FAMILIES["SGD"]).step(lambda n: -1.0).optimizer.state())
    refused(script_of([0, 1]), plain, r"slots \[\] were saved, this SGD has \['momentum'\]")


def test_states_without_names_are_matched_by_shapes_where_these_tell():
    nameless = {"iterations": 1, "0/momentum": numpy.full(3, 2.0), "1/momentum": numpy.full((2, 2), 4.0)}
    small, large = mpidist.Variable(numpy.zeros(3)), mpidist.Variable(numpy.zeros((2, 2)))
    optimizer = optimizers.SGD(**SGD)
    optimizer.restore(nameless)
    optimizer.apply_gradients([(numpy.zeros((2, 2)), large), (numpy.zeros(3), small)])
    assert [optimizer.slots(each)["momentum"].max() for each in (small, large)] == [1.0, 2.0]
    refused(script_of([0, 1]), {**nameless, "1/momentum": numpy.ones(3)}, "cannot be told which variable is which")


def test_an_update_that_was_begun_goes_on_with_as_many_micro_batches():
    def make(count):
        return lambda: optimizers.SGD(1.0, gradient_accumulation_steps=count)

    state = script_of([0], make=make(3)).step(lambda n: 1.0).optimizer.state()
    for count in (1, 2, 4):
        refused(script_of([0], make=make(count)), state, "saved after 1 of 3 micro-batches.*accumulation_steps=")
    with pytest.raises(ValueError, match="micro-batch 2 of 3 has gradients for other variables.*'layer1'"):
        script = script_of([0, 1], make=make(3))
        script.optimizer.restore(state)
        script.step(lambda n: 1.0)


def test_two_variables_of_one_name_are_not_saved():
    with mpidist.OneDeviceStrategy("cpu:0").scope():
        one = mpidist.Variable(numpy.zeros(2), name="twin of test")
    two, optimizer = mpidist.Variable(numpy.zeros(2), name="twin of test"), optimizers.SGD(**SGD)
    for variable in (one, two):
        optimizer.slots(variable)
    with pytest.raises(ValueError, match="two variables of the name 'twin of test'; give each a name of its own"):
        optimizer.state()


def test_the_file_tells_class_slots_names_and_paths(tmp_path):
    script = script_of([1, 0]).step(lambda n: 1.0)
    mpidist.Checkpoint(model=script.model, optimizer=script.optimizer).save(tmp_path / "c.h5")
    with h5py.File(tmp_path / "c.h5") as content:
        attributes = dict(content["optimizer"].attrs)
        assert content["model/key1"].attrs["name"] == '"layer1"'
    assert [attributes[key] for key in ("class", "slot_names", "slot_variables", "slot_paths")] == [
        '"SGD"',
        '["momentum"]',
        '["layer1", "layer0"]',
        '["model/key1", "model/key0"]',
    ]


def test_a_list_in_another_order_is_refused_where_names_tell(tmp_path):
    """Values and slots go by the place in the list: a script that lists its layers otherwise would swap them."""

    def checkpoint_of(names):
        with mpidist.OneDeviceStrategy("cpu:0").scope():
            return mpidist.Checkpoint(variables=[mpidist.Variable(numpy.zeros(2), name=name) for name in names])

    checkpoint_of(["encoder", "decoder"]).save(tmp_path / "c.h5")
    checkpoint_of(["encoder", "renamed"]).restore(tmp_path / "c.h5")
    checkpoint_of([None, None]).restore(tmp_path / "c.h5")
    with pytest.raises(CheckpointError, match="'variables/0' is variable 'encoder' there and 'decoder' here, where"):
        checkpoint_of(["decoder", "encoder"]).restore(tmp_path / "c.h5")
