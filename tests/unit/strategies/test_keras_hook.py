"""The hook that gives Keras models to their adapter, with a package that looks like Keras and one like the adapter."""

from __future__ import annotations

import importlib
import shutil
import sys
import threading

import pytest

import mpidist
from mpidist.strategies.distribution import ADAPTERS
from mpidist.testing import run_ranks

#: It marks what it is given, as the adapter does, and what has begun; it refuses strategies that do not mirror.
ADAPTER = """
def attach(strategy, obj):
    if "Mirrored" not in type(strategy).__name__:
        raise NotImplementedError(f"not by {type(strategy).__name__}")
    obj.__class__ = type(obj.__class__.__name__, (obj.__class__,), {"_mpidist_replica": strategy})

def begin_attached(strategy, objects):
    for obj in objects:
        obj.begun_by = strategy
"""

#: As Keras 3: `Model` makes functional models, and inherits `compile` and `fit`.
KERAS = """
class Trainer:
    def compile(self): return "compiled"
    def fit(self, x): return "trained"
    def train_on_batch(self, x): return "trained"

class Model(Trainer):
    def __new__(cls, *args, **kwargs):
        if args and cls is Model:
            return Functional.__new__(Functional, *args, **kwargs)
        return super().__new__(cls)
    def __init__(self, *args): self.args = args

class Functional(Model):
    def __new__(cls, *args, **kwargs): return super().__new__(cls)

class Sequential(Model):
    def __new__(cls, *args, **kwargs): return super().__new__(cls)
"""

#: Its base has no ``__new__``.
OPTIMIZERS = """
class _Base:
    def __init__(self, rate): self.rate = rate

class Optimizer(_Base):
    pass

class Adam(Optimizer):
    def __init__(self, rate):
        super().__init__(rate)
        self.moments = []
"""


@pytest.fixture
def keras(tmp_path, monkeypatch):
    """Put a package named keras on the path; returns what imports it."""
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text("from keras import optimizers" + KERAS)
    (tmp_path / "keras" / "optimizers.py").write_text(OPTIMIZERS)
    (tmp_path / "adapter_of_keras.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ADAPTERS, "keras", "adapter_of_keras")
    for name in [name for name in sys.modules if name.partition(".")[0] == "keras"]:
        monkeypatch.delitem(sys.modules, name)
    yield lambda: importlib.import_module("keras")
    for name in ("keras", "keras.optimizers", "adapter_of_keras"):
        sys.modules.pop(name, None)


class _Own:
    """A subclass of a user."""

    def __new__(cls, keras):
        return type("Own", (keras.Model,), {"__init__": lambda self: keras.Model.__init__(self)})()


MAKES = {
    "subclass": _Own,
    "sequential": lambda keras: keras.Sequential([]),
    "functional": lambda keras: keras.Model("inputs", "outputs"),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("is_imported", [True, False])
def test_what_is_made_on_several_ranks(keras, make, is_imported):
    classes = [keras().Model, keras().optimizers.Optimizer] if is_imported else []
    before = [dict(vars(each)) for each in classes]
    path = list(sys.meta_path)

    def fn():
        with mpidist.MirroredStrategy().scope() as strategy:
            model, optimizer = make(keras()), keras().optimizers.Adam(0.5)
            assert model._mpidist_replica is optimizer._mpidist_replica is strategy
            assert not hasattr(model, "begun_by")
            found = model.compile(), model.fit(1), optimizer.rate, optimizer.moments
        assert model.begun_by is optimizer.begun_by is strategy
        return found

    assert run_ranks(3, fn) == [("compiled", "trained", 0.5, [])] * 3
    assert sys.meta_path == path
    assert [dict(vars(each)) for each in classes] == before
    assert type(keras().__loader__).__module__ == keras().__spec__.loader.__class__.__module__ != "mpidist"
    assert not hasattr(make(keras()), "_mpidist_replica") and keras().optimizers.Adam(0.25).rate == 0.25


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("kind", [mpidist.experimental.CentralStorageStrategy, mpidist.ParameterServerStrategy])
def test_a_strategy_that_the_adapter_refuses(keras, make, kind):
    def fn():
        with kind().scope():
            make(keras())

    with pytest.raises(Exception, match=f"not by {kind.__name__}"):
        run_ranks(3, fn)
    assert make(keras()).compile() == "compiled"


@pytest.mark.parametrize("call", [lambda m: m.compile(), lambda m: m.fit(1), lambda m: m.train_on_batch(1)])
def test_a_model_of_outside(keras, call):
    model = keras().Sequential()

    def fn():
        with mpidist.MirroredStrategy().scope() as strategy:
            with strategy.scope(), pytest.raises(RuntimeError, match="a Keras model is (compiled|trained) in"):
                call(model)
            with pytest.raises(RuntimeError, match=r"Make it in the scope, or call strategy.distribute\(model\)"):
                strategy.run(call, args=(model,))

    run_ranks(2, fn)
    assert call(model) in ("compiled", "trained")
    assert set(vars(keras().Model)) & {"compile", "fit", "train_on_batch"} == set()


def test_one_rank_is_as_ever(keras):
    def fn():
        found = []
        for strategy in (mpidist.MultiWorkerMirroredStrategy(), mpidist.OneDeviceStrategy("/cpu:0")):
            with strategy.scope():
                found.append(keras().Model().fit(1))
        return found

    assert run_ranks(1, fn) == [["trained"] * 2]
    assert run_ranks(2, lambda: _in_scope_of_one_device(keras)) == ["trained"] * 2


def _in_scope_of_one_device(keras):
    with mpidist.OneDeviceStrategy("/cpu:0").scope():
        return keras().Model().fit(1)


def test_other_threads_are_left_alone(keras):
    found = []

    def fn():
        with mpidist.MirroredStrategy().scope():
            thread = threading.Thread(target=lambda: found.append(keras().Sequential().fit(1)))
            thread.start()
            thread.join()

    run_ranks(2, fn)
    assert found == ["trained"] * 2


def test_a_package_that_is_no_keras_and_one_that_is_broken(keras, tmp_path):
    (tmp_path / "keras" / "__init__.py").write_text("value = 1")

    def fn():
        with mpidist.MirroredStrategy().scope():
            return keras().value

    assert run_ranks(2, fn) == [1, 1]
    del sys.modules["keras"]
    (tmp_path / "keras" / "__init__.py").write_text("value = 1 / 0")
    shutil.rmtree(tmp_path / "keras" / "__pycache__", ignore_errors=True)
    importlib.invalidate_caches()
    with pytest.raises(ZeroDivisionError):
        run_ranks(2, fn)


def test_nothing_imports_keras(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)

    def fn():
        with mpidist.MirroredStrategy().scope():
            return "keras" in sys.modules

    assert run_ranks(2, fn) == [False, False]
