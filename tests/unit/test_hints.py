"""Hints for names that mpidist does not have."""

from __future__ import annotations

import importlib
import importlib.util
import re

import pytest

import mpidist
from mpidist import hints

#: Those of a framework are tested where it is installed.
HINTED = sorted(name for names in hints._HINTS for name in names.split() if not name.startswith("torch."))


def owner_of(dotted: str) -> tuple[object, str]:
    namespace, _, name = f"mpidist.{dotted}".rpartition(".")
    return importlib.import_module(namespace), name


@pytest.mark.parametrize("dotted", HINTED)
def test_no_hint_is_for_a_name_that_is_there(dotted):
    owner, name = owner_of(dotted)
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match=rf"^module '{owner.__name__}' has no attribute '{name}'; \w"):
        getattr(owner, name)


@pytest.mark.parametrize("hint", hints._HINTS.values())
def test_names_in_hints_are_there(hint):
    for dotted in re.findall(r"\bmpidist((?:\.\w+)+)", hint):
        value = mpidist
        if re.match(r"\.(autograd|jax|keras|torch)\b", dotted):  # only where the framework is installed
            continue
        for part in dotted.strip(".").split("."):
            if part != "X":
                value = getattr(value, part)


@pytest.mark.parametrize(
    "module, name, meant",
    [
        ("", "MirroredStrategie", "MirroredStrategy"),
        ("", "MultiWorkerMirroredStrategie", "MultiWorkerMirroredStrategy"),
        ("", "trainer", "Trainer"),
        ("", "optimizer", "optimizers"),
        (".optimizers", "RMSProp", "RMSprop"),
        (".optimizers", "Lars", "LARS"),
        (".metrics", "Acuracy", "Accuracy"),
        (".callbacks", "EarlyStoping", "EarlyStopping"),
        (".data", "Datasets", "Dataset"),
        (".errors", "TransportTimeout", "TransportTimeoutError"),
        (".experimental", "CommunicationOption", "CommunicationOptions"),
        (".testing", "run_rank", "run_ranks"),
    ],
)
def test_near_misses_are_named(module, name, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(importlib.import_module(f"mpidist{module}"), name)
    assert f"; did you mean {meant!r}?" in str(caught.value)


def test_a_namespace_lists_its_names_where_nothing_is_near():
    with pytest.raises(
        AttributeError, match="mpidist.data has AUTOTUNE, ArraySpec, AutoShardPolicy, Dataset, Options$"
    ):
        _ = mpidist.data.Zyx
    with pytest.raises(AttributeError, match="^module 'mpidist' has no attribute 'zyx'$"):
        _ = mpidist.zyx


@pytest.mark.parametrize(
    "statement, hint",
    [
        ("from mpidist import MirroredStrategie", "did you mean 'MirroredStrategy'"),
        ("from mpidist.optimizers import Lamb", "LAMB"),
    ],
)
def test_imports_give_the_hint_too(statement, hint):
    with pytest.raises(ModuleNotFoundError, match=hint):
        exec(statement)


def test_names_without_a_hint_are_looked_for_as_ever():
    assert importlib.util.find_spec("mpidist.zyx") is None
    assert importlib.util.find_spec("mpidist.training.zyx") is None
    with pytest.raises(ImportError, match="cannot import name 'zyx' from 'mpidist'"):
        exec("from mpidist import zyx")


def test_probing_does_not_raise():
    assert not hasattr(mpidist, "summary") and getattr(mpidist, "summary", None) is None
    assert not hasattr(mpidist.optimizers, "Lamb")
