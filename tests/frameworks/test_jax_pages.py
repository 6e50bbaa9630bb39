"""The examples of `docs/jax.md` and `examples/jax_digits.py` run on all ranks."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).resolve().parents[2]


def test_the_examples_of_the_page_run_one_after_another():
    blocks = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / "jax.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["gradients"]["w"].shape == (3, 2)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the digits are a file of scikit-learn")
def test_the_digits_are_learnt(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jax_digits.py", "--epochs", "6"])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / "jax_digits.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert not printed or float(printed.split()[-1]) > 0.9
