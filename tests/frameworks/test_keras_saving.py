"""Distributed Keras models in files and in configurations: what Keras does with models of the user's classes."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import warnings

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

import mpidist
from mpidist.world import world_communicator
from tests.frameworks.keras_models import (
    BOUNDS,
    X,
    Y,
    assert_histories,
    assert_same,
    compiled,
    distributed,
    folder_of_rank_0,
    sequential,
    stock,
)

pytestmark = pytest.mark.mpi


@keras.saving.register_keras_serializable("tests")
class Registered(keras.Model):
    """A class that Keras finds by the name that it was registered by."""

    def __init__(self, units=6, **settings):
        super().__init__(**settings)
        self.units = units
        self.hidden = keras.layers.Dense(units, activation="tanh")
        self.last = keras.layers.Dense(1)

    def call(self, inputs):
        return self.last(self.hidden(inputs))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("tests")
class OwnCompile(Registered):
    """Its `compile` takes other arguments, and `compute_loss` one less."""

    def compile(self, optimizer, loss_fn):
        super().compile(optimizer)
        self.loss_fn = loss_fn

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return keras.ops.mean(self.loss_fn(y, y_pred))

    def get_compile_config(self):
        return {"optimizer": keras.saving.serialize_keras_object(self.optimizer), "loss_fn": "mse"}

    def compile_from_config(self, config):
        optimizer = keras.saving.deserialize_keras_object(config["optimizer"])
        self.compile(optimizer, keras.losses.get(config["loss_fn"]))
        self.optimizer.build(self.trainable_variables)


def registered(kind=Registered):
    model = kind()
    model(X[:1])
    return model


def own_compile():
    return registered(OwnCompile)


def compile_fn(model):
    if isinstance(model, OwnCompile):
        model.compile(keras.optimizers.Adam(0.02), keras.losses.get("mse"))
    else:
        compiled()(model)


MODELS = [sequential, registered, own_compile]


def train(model):
    return model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0)


@pytest.mark.parametrize("make", MODELS)
def test_a_compiled_model_that_is_loaded_in_the_scope(make, tmp_path):
    """It trains on from where it was, with the state of its optimizer."""
    one = stock(make, compile_fn)
    train(one)
    one.save(tmp_path / "model.keras")
    expected = train(one)
    with mpidist.MultiWorkerMirroredStrategy().scope(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # "compile() was not called"
        many = keras.models.load_model(tmp_path / "model.keras")
    found = train(many)
    assert_histories(expected, found)
    assert_same(one, many)


def test_an_own_compile_without_its_configuration(tmp_path):
    """Keras warns, and leaves the model uncompiled, in a scope as elsewhere."""

    class Without(keras.Sequential):
        def compile(self, **settings):
            super().compile(**settings)

    def make():
        return Without([keras.Input((3,)), keras.layers.Dense(1)])

    stock(make, lambda model: model.compile(optimizer="sgd", loss="mse")).save(tmp_path / "model.keras")
    with mpidist.MultiWorkerMirroredStrategy().scope(), pytest.warns(UserWarning, match="is custom"):
        model = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Without": Without})
    assert not hasattr(model, "optimizer")


def saved(model, path):
    keras.saving.save_model(model, path)
    return keras.models.load_model(path)


COPIES = {
    "save_model": saved,
    "clone_model": lambda model, path: keras.models.clone_model(model),
    "deepcopy": lambda model, path: copy.deepcopy(model),
    "pickle": lambda model, path: pickle.loads(pickle.dumps(model)),
    "to_json": lambda model, path: keras.models.model_from_json(model.to_json()),
}


@pytest.mark.parametrize("make", [sequential, registered])
@pytest.mark.parametrize("how", COPIES)
def test_copies(make, how, tmp_path):
    model = distributed(make, compile_fn)
    model.fit(X, Y, verbose=0)
    again = COPIES[how](model, tmp_path / "model.keras")
    assert isinstance(again, type(make()))
    again.build((None, 3))
    if how in ("save_model", "deepcopy", "pickle"):
        numpy.testing.assert_allclose(again.predict(X, verbose=0), model.predict(X, verbose=0), **BOUNDS)
    assert [each.shape for each in again.variables] == [each.shape for each in model.variables]


def test_the_configuration_of_compile():
    found = distributed(sequential, compile_fn).get_compile_config()
    expected = stock(sequential, compile_fn).get_compile_config()
    assert found["optimizer"]["class_name"] == expected["optimizer"]["class_name"] == "Adam"
    assert found["optimizer"]["module"] == expected["optimizer"]["module"]
    assert found["loss"] == expected["loss"] and found["metrics"] == expected["metrics"]


def test_signatures_are_those_of_each_class():
    """Keras asks whether `compute_loss` takes `training`."""
    for make in (own_compile, registered, own_compile):
        model = distributed(make, compile_fn)
        assert len(model.fit(X, Y, verbose=0).history["loss"]) == 1


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_processes_of_one_number_write_one_file(name, tmp_path, monkeypatch):
    """As in containers: each writes under a name of its own, and the file is whole."""
    path, written = folder_of_rank_0(tmp_path) / name, []
    model = distributed(sequential, compiled())
    model.fit(X, Y, verbose=0)
    method = "save" if name == "model.keras" else "save_weights"
    of_keras = getattr(keras.Model, method)

    def noted(self, filepath, *args, **settings):
        written.append(str(filepath))
        return of_keras(self, filepath, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(keras.Model, method, noted)
        patch.setattr(os, "getpid", lambda: 1)
        getattr(model, method)(path)
    every = world_communicator().exchange(written[0].encode())
    assert len(written) == 1 and len(set(every)) == len(every)
    again = sequential()
    again.load_weights(path)
    assert_same(again, model)
    assert [each.name for each in path.parent.iterdir()] == [name]


@pytest.mark.parametrize("name", ["model.weights.json", "model.weights.h5"])
@pytest.mark.filterwarnings("ignore:.*sharded weights requires")
def test_weights_in_several_files(name, tmp_path):
    """One has the names of the others."""
    model = distributed(sequential, compiled())
    model.fit(X, Y, verbose=0)
    model.save_weights(tmp_path / name, max_shard_size=1e-7)
    again = sequential()
    again.load_weights(tmp_path / "model.weights.json")
    assert_same(again, model)
    assert len(list(tmp_path.iterdir())) > 2 and not list(tmp_path.glob(".*"))


@pytest.mark.mpi(min_size=2)
def test_a_model_that_is_not_zipped(tmp_path, monkeypatch):
    """Ranks write one folder at the same time, also where it is there already."""
    path = folder_of_rank_0(tmp_path) / "model"
    model, of_keras = distributed(sequential, compiled()), keras.Model.save

    def together(self, *args, **settings):
        of_keras(self, *args, **settings)
        world_communicator().exchange(b"written")

    monkeypatch.setattr(keras.Model, "save", together)
    for _ in range(2):
        model.fit(X, Y, verbose=0)
        model.save(path, zipped=False)
        world_communicator().exchange(b"saved")
        assert_same(keras.models.load_model(path), model)
    assert [each.name for each in path.parent.iterdir()] == ["model"]


def test_an_evaluator_takes_whole_files_of_keras(tmp_path, caplog):
    """The oldest first; what is damaged is passed over, and what is being written is not looked at."""
    model, folder = stock(sequential, compiled()), tmp_path / "saved"
    folder.mkdir()
    expected = []
    for number, name in enumerate(["b.keras", "a.weights.h5"]):
        train(model)
        model.save(folder / name) if name.endswith(".keras") else model.save_weights(folder / name)
        os.utime(folder / name, (number, number))
        expected.append((name, model.evaluate(X, Y, verbose=0, return_dict=True)))
    for name in ("c.keras", "d.weights.h5", ".e.keras", "f.txt"):
        (folder / name).write_bytes(b"damaged")
    own = stock(sequential, compiled())
    found = mpidist.SidecarEvaluator(own, (X, Y), folder, ended=lambda: True).start()
    assert [each.path.name for each in found] == [name for name, _ in expected]
    for result, (_, logs) in zip(found, expected, strict=True):
        assert result.logs == pytest.approx(logs)
    assert caplog.text.count("passes it over") == 2
    with pytest.raises(TypeError, match="takes no checkpoint="):
        mpidist.SidecarEvaluator(own, X, folder, checkpoint=mpidist.Checkpoint(), ended=lambda: True)
    with pytest.raises(ValueError, match="nothing tells when the training has ended"):
        mpidist.SidecarEvaluator(own, X, folder)
