"""Dependencies of mpidist's modules point one way, without circles; optional packages are imported where they belong.

All imports count, at the top and inside functions, but those for annotations: under ``if TYPE_CHECKING:`` nothing is
loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

import mpidist
from tests.helpers.parsed import parsed

PACKAGE = Path(__file__).resolve().parents[2] / "mpidist"

#: From the lowest layer to the highest.  A module imports from its own folder and from lower layers.
LAYERS = (
    ("hints",),
    ("lazy_names",),
    ("errors",),
    ("options", "nest", "output", "own_machine", "own_process", "packages", "whole_file"),
    ("context",),
    ("arrays", "cluster"),
    ("device",),
    ("schedules",),
    ("runtime",),
    ("transports",),
    ("collectives",),
    ("tuning", "tracing"),
    ("world",),
    ("ranks", "world_collectives", "compression", "reporting"),
    ("variables",),
    ("cross_device_ops",),
    ("optimizers", "input"),
    ("parameter_server",),
    ("strategies",),
    ("training",),
    ("frameworks",),
    ("testing",),
    # public names of what lies below
    ("callbacks", "cluster_resolver", "config", "coordinator", "data", "estimator", "experimental", "feature_column"),
    ("metrics", "tpu", "autograd", "jax", "keras", "torch"),
    ("__init__",),
    ("jobs", "diagnosis"),
    ("commands",),
    ("__main__",),
)

#: Package -> the only files (as patterns) that may import it.
FOREIGN = {
    # bench holds the all-reduce against MPI itself; a rank's Python is told how a program ends that is of mpi4py alone
    "mpi4py": (
        *("transports/mpi.py", "cluster/resolvers/mpi.py", "runtime/control_mpi.py", "commands/bench.py"),
        "commands/launch/python_start/sitecustomize.py",
    ),
    "cupy": ("arrays.py", "device/*.py"),
    "benchmarks": (),  # they stay in the checkout
    "keras": ("keras.py", "frameworks/keras/*.py"),
    "torch": ("torch.py", "frameworks/torch/*.py", "frameworks/keras/torch_*.py"),
    "autograd": ("frameworks/autograd.py", "autograd.py"),
    "jax": ("frameworks/jax/*.py", "jax.py", "frameworks/keras/jax_*.py"),
    "optax": ("frameworks/jax/*.py",),
    "jinja2": ("jobs/script.py",),
    "shtab": ("commands/completion.py",),
    "tomli": ("jobs/site.py",),
    "h5py": ("training/checkpoint*.py", "training/hdf5*.py", "input/hdf5*.py", "commands/info.py"),
}

_LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def sources() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def top(path: str) -> str:
    """Return the name under which a file of the package stands in LAYERS."""
    return path.partition("/")[0].removesuffix(".py")


def imports(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything a file imports when it runs."""
    package = ["mpidist", *path.split("/")[:-1]]
    for node in _that_run(parsed(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # "from mpidist import errors" imports mpidist.errors, so the names count too
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `tree`, without what stands under ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            node = ast.Module(node.orelse, [])
        yield node
        yield from _that_run(node)


def layer_of(dotted: str, known: frozenset[str]) -> str | None:
    """Return the layer's member that an imported name belongs to; None for other packages."""
    first, *rest = dotted.split(".")
    if first != "mpidist":
        return None
    return rest[0] if rest and rest[0] in known else "__init__"


def layer_breaches(files: Mapping[str, str]) -> list[str]:
    known = frozenset(map(top, files))
    found = [
        f"{name}: a new top-level module; give it a place in LAYERS of {Path(__file__).name}"
        for name in sorted(known - set(_LEVELS))
    ]
    for path, text in files.items():
        own = top(path)
        for line, dotted in imports(path, text):
            other = layer_of(dotted, known)
            if own in _LEVELS and other in _LEVELS and other != own and _LEVELS[other] >= _LEVELS[own]:
                found.append(f"{path}:{line}: {own} imports {dotted}, which is not below it")
    return found


def imported_files(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return by file the other files of the package that it imports."""
    file_of = {_module(path): path for path in files}
    found: dict[str, set[str]] = {}
    for path, text in files.items():
        found[path] = set()
        for _, dotted in imports(path, text):
            while dotted and dotted not in file_of:
                dotted = dotted.rpartition(".")[0]
            found[path] |= {file_of[dotted]} - {path} if dotted else set()
    return found


def _module(path: str) -> str:
    return ".".join(["mpidist", *path.removesuffix(".py").split("/")]).removesuffix(".__init__")


def circles(files: Mapping[str, str]) -> set[tuple[str, ...]]:
    """Return the sets of files that reach each other by imports."""
    above = imported_files(files)
    reached = {path: _reached(path, above) for path in files}
    found = {tuple(sorted(other for other in reached[path] if path in reached[other])) for path in files}
    return {circle for circle in found if len(circle) > 1}


def _reached(path: str, above: Mapping[str, set[str]]) -> set[str]:
    """Return the files that one imports, or what it imports does, and so on; its own only where a circle leads back."""
    reached, waiting = set[str](), [*above[path]]
    while waiting:
        at = waiting.pop()
        if at not in reached:
            reached.add(at)
            waiting += above[at]
    return reached


def foreign_breaches(files: Mapping[str, str]) -> list[str]:
    return [
        f"{path}:{line}: {dotted} may be imported only in {', '.join(FOREIGN[package])}"
        for path, text in files.items()
        for line, dotted in imports(path, text)
        for package in [dotted.partition(".")[0].replace("cupyx", "cupy").replace("cupy_backends", "cupy")]
        if package in FOREIGN and not any(fnmatch(path, pattern) for pattern in FOREIGN[package])
    ]


def lazy_breaches(files: Mapping[str, str]) -> list[str]:
    """Names that the package loads on first use: one that a module wants while it is loaded waits for other threads."""
    return [
        f"{path}:{node.lineno}: import {alias.name} from where it is, not from the package"
        for path, text in files.items()
        for node in _that_run(parsed(text))
        if isinstance(node, ast.ImportFrom) and node.module == "mpidist"
        for alias in node.names
        if alias.name in mpidist.__all__
    ]


def environment_breaches(files: Mapping[str, str]) -> list[str]:
    return [
        f"{path}:{node.lineno}: MPIDIST_* variables are read in options.py only"
        for path, text in files.items()
        if path != "options.py"
        for node in ast.walk(parsed(text))
        if reads_setting(node)
    ]


def reads_setting(node: ast.AST) -> bool:
    """Return whether `node` looks an MPIDIST_* variable up in an environment, by its name as a constant."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return _is_environ(node.value) and _is_setting(node.slice)
    if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)) and node.args:
        getenv = (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id) == "getenv"
        of_environ = isinstance(node.func, ast.Attribute) and _is_environ(node.func.value)
        return (getenv or of_environ) and _is_setting(node.args[0])
    if isinstance(node, ast.Compare):
        return _is_setting(node.left) and any(map(_is_environ, node.comparators))
    return False


def _is_environ(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _is_setting(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).startswith("MPIDIST_")


@pytest.mark.parametrize("check", [layer_breaches, foreign_breaches, environment_breaches, lazy_breaches])
def test_the_package_has_no_breach(check):
    files = sources()
    assert len(files) > 10
    assert check(files) == []


def test_training_knows_nothing_of_servers():
    names = {
        name for path, text in sources().items() if path.startswith("training/") for _, name in imports(path, text)
    }
    assert any(name.startswith("mpidist.strategies.workers") for name in names)
    assert {name for name in names if "parameter_server" in name} == set()


#: Of a function, its docstring not counted.
MOST_LINES = 60


def long_functions(files: Mapping[str, str]) -> list[str]:
    return [
        f"{path}:{node.lineno}: {node.name} has {lines} lines, more than {MOST_LINES}"
        for path, text in files.items()
        for node in ast.walk(parsed(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for lines in [_lines(node)]
        if lines > MOST_LINES
    ]


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    own = 0 if docstring is None else docstring.end_lineno - docstring.lineno + 1
    return node.end_lineno - node.lineno + 1 - own


def test_no_function_is_too_long():
    assert long_functions(sources()) == []


@pytest.mark.parametrize(("lines", "found"), [(59, 0), (60, 1)])
def test_a_long_function_is_found_and_its_docstring_is_not_counted(lines, found):
    text = "def f():\n" + '    """What it does.\n\n    More of it.\n    """\n' + "    x = 1\n" * lines
    assert len(long_functions({"errors.py": text})) == found


def test_there_are_no_circles_of_files():
    assert circles(sources()) == set()


@pytest.mark.parametrize(
    "text",
    [
        "from mpidist.context import a",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from mpidist.context.a import A",
        "def f():\n    import mpidist.context.a",
        "from .a import A",
        "from mpidist.errors import E",
    ],
)
def test_a_circle_of_files_is_found(text):
    files = {"errors.py": "from mpidist.context import a", "context/a.py": "from . import b", "context/b.py": text}
    found = ("context/a.py", "context/b.py", *(["errors.py"] if "errors" in text else []))
    assert circles({"context/__init__.py": "from .a import A", **files}) == {found}


def test_imports_in_one_direction_are_no_circle():
    files = {
        "context.py": "from mpidist import errors, nest",
        "errors.py": "from .nest import x",
        "nest.py": "import a\nif TYPE_CHECKING:\n    from mpidist.context import Context",
    }
    assert circles(files) == set()


LOWEST = {"__init__.py": "", "errors.py": "", "options.py": "", "context.py": "", "transports/mpi.py": ""}


@pytest.mark.parametrize(
    "path, text",
    [
        ("errors.py", "from mpidist.context import get_strategy"),
        ("errors.py", "def f():\n    import mpidist.context"),
        ("context.py", "from mpidist import transports"),
        ("context.py", "from .transports import mpi"),
        ("transports/mpi.py", "from mpidist import ReduceOp"),
        ("transports/mpi.py", "from .. import get_strategy"),
        ("helpers.py", ""),
    ],
)
def test_a_breach_of_layers_is_found(path, text):
    assert len(layer_breaches({**LOWEST, path: text})) == 1


@pytest.mark.parametrize(
    "path, text",
    [
        ("context.py", "from mpidist.errors import MpidistError\nimport mpidist.options"),
        ("transports/mpi.py", "from . import base\nfrom ..context import get_strategy\nimport numpy"),
        ("transports/mpi.py", "from mpidist.transports.base import Transport"),
        ("errors.py", "import typing\nif typing.TYPE_CHECKING:\n    from mpidist.context import Context"),
    ],
)
def test_imports_from_below_and_from_the_same_folder_are_fine(path, text):
    assert layer_breaches({**LOWEST, path: text}) == []


@pytest.mark.parametrize(
    "path, text, breaches",
    [
        ("context.py", "def f():\n    from mpi4py import MPI", 1),
        ("transports/mpi.py", "from mpi4py import MPI", 0),
        ("device/nccl.py", "from cupy.cuda import nccl", 0),
        ("training/trainer.py", "import h5py", 1),
        ("training/checkpoint.py", "import h5py", 0),
    ],
)
def test_packages_are_imported_where_they_belong(path, text, breaches):
    assert len(foreign_breaches({path: text})) == breaches


@pytest.mark.parametrize(
    "text, breaches",
    [
        ("import os\nos.environ['MPIDIST_ALGORITHM']", 1),
        ("from os import environ\nenviron.get('MPIDIST_ALGORITHM', 'auto')", 1),
        ("os.getenv('MPIDIST_ALGORITHM')", 1),
        ("'MPIDIST_ALGORITHM' in os.environ", 1),
        ("os.environ['OMP_NUM_THREADS']", 0),
        ("print('set MPIDIST_ALGORITHM')", 0),
    ],
)
def test_settings_are_read_in_one_place(text, breaches):
    assert len(environment_breaches({"context.py": text})) == breaches
    assert environment_breaches({"options.py": text}) == []


@pytest.mark.parametrize(
    "text, breaches",
    [
        ("from mpidist import arrays, errors", 1),
        ("def fn():\n    from mpidist import Checkpoint, optimizers", 2),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mpidist import errors", 0),
        ("from mpidist.errors import MpidistError", 0),
    ],
)
def test_modules_do_not_import_what_the_package_loads_on_first_use(text, breaches):
    assert len(lazy_breaches({"strategies/base.py": text})) == breaches
