"""`Strategy.distribute`: an object's adapter is found by its classes, and one that nobody knows is named."""

from __future__ import annotations

import sys
import types

import pytest

import mpidist
from mpidist.strategies import distribution


def of_module(name, *bases):
    """Return an object whose class says that it comes from a module."""
    return type("Net", bases, {"__module__": name})()


@pytest.fixture
def adapter(monkeypatch):
    """Give the frameworks ``toy`` and ``other`` adapters that return what they were called with."""
    for name in ("toy", "other"):
        module = types.ModuleType(f"{name}_adapter")
        module.distribute = lambda strategy, objects, name=name, **options: [
            (name, strategy, each, options) for each in objects
        ]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(distribution, "ADAPTERS", {"toy": "toy_adapter", "other": "other_adapter"})


@pytest.fixture
def strategy():
    return mpidist.OneDeviceStrategy("/cpu:0")


def test_one_object_gives_one_result_and_several_a_tuple(adapter, strategy):
    first, second = of_module("toy.nn"), of_module("toy")
    assert strategy.distribute(first, overlap="none") == ("toy", strategy, first, {"overlap": "none"})
    assert strategy.distribute(first, second) == (("toy", strategy, first, {}), ("toy", strategy, second, {}))


def test_a_user_s_class_goes_to_the_nearest_known_base(adapter, strategy):
    base = type(of_module("other.base"))
    nearer = type(of_module("toy.models", base))
    mine = of_module("__main__", nearer)
    assert strategy.distribute(mine)[0] == "toy"


@pytest.mark.parametrize("obj", [3, "model", lambda x: x, of_module("torchlike.nn")])
def test_an_object_that_nobody_knows_is_an_error_that_lists_what_is_known(strategy, obj):
    with pytest.raises(TypeError, match=f"of keras, torch; got {type(obj).__module__}.{type(obj).__qualname__}"):
        strategy.distribute(obj)


def test_objects_of_several_frameworks_are_refused(adapter, strategy):
    with pytest.raises(TypeError, match="one framework at a time, got toy.Net of toy, other.Net of other"):
        strategy.distribute(of_module("toy"), of_module("other"))


def test_no_object_is_refused(strategy):
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        strategy.distribute()
