"""Each private name of a framework that an adapter uses is in the list, with a canary that uses it too."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import types
from pathlib import Path

import pytest

import mpidist
from mpidist.errors import MissingDependencyError
from mpidist.frameworks import private_names
from mpidist.packages import pip_install
from tests.helpers.parsed import parsed

PACKAGE = Path(mpidist.__file__).parent
ROOT = PACKAGE.parent
FRAMEWORKS = {"keras", "torch", "jax", "optax", "autograd"}
ADAPTERS = {str(path.relative_to(PACKAGE)): path.read_text() for path in (PACKAGE / "frameworks").rglob("*.py")}
del ADAPTERS["frameworks/private_names.py"]

LISTED = {each.name.rpartition(".")[2] for each in private_names.PRIVATE_NAMES}
#: Names of a listed one's way, such as ``_C``.
ON_THE_WAY = {part for each in private_names.PRIVATE_NAMES for part in each.name.split(".")[:-1]}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def own_names(texts):
    """Return the private names that the package itself gives to something."""
    found = set()
    for text in texts:
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


OWN = own_names(path.read_text() for path in PACKAGE.rglob("*.py"))


def private_imports(tree):
    """Yield what is imported out of modules of a framework that are private, as whole names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in FRAMEWORKS:
            for each in node.names:
                yield f"{node.module}.{each.name}"
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] in FRAMEWORKS)


def is_private_path(name):
    return any(part in ("src", "_src") or is_private(part) for part in name.split("."))


def private_attributes(tree, own=frozenset()):
    """Yield attributes and arguments with a leading underscore that are not the package's own, also as strings.

    An f-string that begins so is yielded as it is written, which is never in the list: names are written out.
    """
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and (node.attr not in own or node.attr in LISTED):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg and is_private(node.arg) and node.arg not in own:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
            is_own = text in own or text.startswith("_mpidist_")
            if text.isidentifier() and is_private(text) and not is_own:
                yield text
        elif isinstance(node, ast.JoinedStr) and is_private(ast.unparse(node)[2:-1]):
            yield ast.unparse(node)


def below_comments(text):
    """Yield the three lines of code below each comment that begins with ``# Private``."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.string.startswith("# Private"):
            yield token.start[0], "\n".join(lines[token.start[0] : token.start[0] + 3])


@pytest.mark.parametrize("file", sorted(ADAPTERS))
def test_private_names_are_in_the_list(file):
    tree = parsed(ADAPTERS[file])
    imported = {name for name in private_imports(tree) if is_private_path(name)}
    assert imported <= {each.name for each in private_names.PRIVATE_NAMES}
    assert {*private_attributes(tree, OWN)} <= LISTED | ON_THE_WAY
    for line, below in below_comments(ADAPTERS[file]):
        assert any(name in below for name in LISTED), f"{file}:{line}: nothing below '# Private' is in the list"


def test_what_is_in_the_list_is_used():
    used = "\n".join(ADAPTERS.values())
    assert [each.name for each in private_names.PRIVATE_NAMES if each.name.rpartition(".")[2] not in used] == []


@pytest.mark.parametrize("private", private_names.PRIVATE_NAMES, ids=lambda private: private.name)
def test_each_has_a_canary_that_uses_it(private):
    file, _, name = private.canary.partition("::")
    (found,) = (
        node
        for node in parsed((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    assert private.name.rpartition(".")[2] in ast.unparse(found)


def test_private_uses_are_found():
    """Attributes, arguments and strings; of this package none."""
    text = (
        "from keras.src.backend import a\nfrom keras.src import b\nimport jax._src.core\nfrom torch import nn\n"
        "def f(x):\n    # Private: why\n    return x._hidden, self._other, getattr(x, '_named'), x._own, x.__dict__\n"
        "def g(x):\n    '_no name'\n    x(_argument=1, **{'_key': 1}), vars(x)['_item'], '_found' in vars(x)\n"
        "    return x(_own=1), f'_put{x}', f'__{x}__', '_mpidist_replica', f'{x}_later'\n"
    )
    tree = ast.parse(text)
    found = {name for name in private_imports(tree) if is_private_path(name)}
    assert found == {"keras.src.backend.a", "keras.src.b", "jax._src.core"}
    strings = {"_argument", "_key", "_item", "_found", "f'_put{x}'"}
    assert {*private_attributes(tree, {"_own"})} == {"_hidden", "_other", "_named"} | strings
    assert [below.strip()[:14] for _, below in below_comments(text)] == ["return x._hidd"]


def release(monkeypatch, **names):
    """Let a pretended release of a framework be installed, with these names of its class."""
    module = types.ModuleType("pretended")
    module.__version__ = "9.1"
    module.Model = type("Model", (), names)
    monkeypatch.setitem(sys.modules, "pretended", module)
    listed = (
        private_names.PrivateName("pretended.Model._build", "building", "t"),
        private_names.PrivateName("pretended.src.hidden", "hiding", "t"),
        private_names.PrivateName("pretended.Model()._later", "waiting", "t"),
    )
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", listed)
    monkeypatch.setitem(private_names.VERSIONS, "pretended", "pretended>=8,<9.1")
    return module


def test_a_release_without_a_name_is_refused(monkeypatch):
    module = release(monkeypatch)
    with pytest.raises(MissingDependencyError) as raised:
        private_names.require("pretended")
    assert str(raised.value) == (
        "pretended 9.1 lacks private names that mpidist uses: pretended.Model._build (building), pretended.src.hidden "
        "(hiding). Install a version that has them: pip install 'pretended>=8,<9.1'"
    )
    assert isinstance(raised.value, ImportError)
    module.Model._build = module.src = types.SimpleNamespace(hidden=1)
    private_names.require("pretended")


def test_every_framework_has_a_range_of_versions():
    assert private_names.VERSIONS.keys() == {each.package for each in private_names.PRIVATE_NAMES}


def test_the_range_of_keras_is_the_same_everywhere():
    wanted = private_names.VERSIONS["keras"]
    assert pip_install("keras") == f"pip install '{wanted}'"
    for file in ("docs/keras.md", "setup.cfg"):
        assert set(re.findall(r"keras>=[\d.]+,<[\d.]+", (ROOT / file).read_text())) == {wanted}, file
