"""A framework that is not installed: the error names the extra."""

import importlib
import sys

import pytest

from mpidist.errors import MissingDependencyError


@pytest.mark.parametrize("framework", ["jax", "autograd"])
def test_the_error_names_the_extra(framework, monkeypatch):
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"mpidist.{framework}", raising=False)
    with pytest.raises(MissingDependencyError, match=f"pip install {framework}"):
        importlib.import_module(f"mpidist.{framework}")
