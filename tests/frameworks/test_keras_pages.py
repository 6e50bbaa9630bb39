"""The page and the example of Keras run, on any number of ranks."""

from __future__ import annotations

import importlib.util
import sys

import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

from tests.frameworks.keras_models import assert_alike
from tests.helpers.pages import ROOT, blocks

pytestmark = pytest.mark.mpi

BLOCKS = [block for block in blocks() if block.how == "keras"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_every_example_of_the_page_runs(block):
    names = {"__name__": "__main__"}
    exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)
    assert_alike(names["model"])


def test_the_page_has_examples():
    assert {block.page.name for block in BLOCKS} == {"keras.md"}


def test_the_digits(monkeypatch, tmp_path, capfd):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(ROOT / "examples")
    spec = importlib.util.spec_from_file_location("keras_digits", ROOT / "examples" / "keras_digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = tmp_path / "model.keras"
    monkeypatch.setattr(sys, "argv", ["keras_digits.py", "--epochs", "4", "--save", str(path)])
    keras.utils.set_random_seed(0)
    module.main()
    train, test = module.digits.load()
    loss, accuracy = keras.models.load_model(path).evaluate(*test, verbose=0)
    assert accuracy > 0.85
