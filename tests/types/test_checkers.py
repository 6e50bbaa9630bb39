"""What mypy, pyright and editors make of programs that use mpidist."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import jedi
import pytest

import mpidist
from tests.helpers.pages import PAGES, ROOT, blocks

SCRIPTS = sorted((ROOT / "tests" / "types" / "scripts").glob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MISTAKES = ROOT / "tests" / "types" / "mistakes.py"
#: Their text is no single program, or needs what a checker cannot know.
UNCHECKED = {"checkpoints.md"}
#: Kinds of findings that say nothing of mpidist: loops of a page might not run, names may stand for their output.
OF_PAGES = {"reportPossiblyUnbound", "reportPossiblyUnboundVariable", "reportUnusedExpression"}
#: What returns arrays of the kind given, or whatever was sent.
ANY = {
    f"mpidist.{name}"
    for name in "all_gather all_reduce all_to_all broadcast broadcast_object gather receive reduce_scatter".split()
}
CACHE = ROOT / ".mypy_cache" / "users"

Finding = tuple[str, int, str]  # file, line, and what the checker calls it


def environment() -> dict[str, str]:
    """Return an environment in which mpidist is found as an installed package is, whatever kind of installation."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def mypy(paths: Sequence[Path], folder: Path, *options: str) -> dict[Finding, str]:
    """Return what ``mypy --strict`` reports, notes left out, with its texts."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", CACHE]
    done = subprocess.run([*command, *options, *paths], cwd=folder, env=environment(), capture_output=True, text=True)
    assert not done.stderr, done.stderr
    found = re.findall(r"^(.+?):(\d+): error: (.*?)  \[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    assert done.returncode == bool(found), done.stdout
    return {(Path(path).name, int(line), code): text for path, line, text, code in found}


def pyright(paths: Sequence[Path], folder: Path) -> dict[Finding, str]:
    """Return what pyright reports, with its texts."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *paths]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(paths), done.stdout
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each.get("rule", "")): each["message"]
        for each in report["generalDiagnostics"]
    }


# -- right programs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_run(script):
    subprocess.run([sys.executable, script], check=True, timeout=120, env=environment())


def test_mypy_has_no_objection_to_scripts(tmp_path):
    assert mypy(SCRIPTS, tmp_path) == {}


def test_pyright_has_no_objection_to_scripts(tmp_path):
    assert pyright(SCRIPTS, tmp_path) == {}


def test_mypy_has_no_objection_to_examples(tmp_path):
    of_others = ("--ignore-missing-imports", "--disable-error-code=untyped-decorator")  # autograd
    of_others += ("--allow-subclassing-any",)  # PyTorch, which is not installed here
    as_numpy = ("--allow-any-generics", "--no-warn-unused-ignores")  # differs by its version
    assert mypy(EXAMPLES, ROOT / "examples", *of_others, *as_numpy) == {}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> list[Path]:
    """Return the examples of the pages as files."""
    folder = tmp_path_factory.mktemp("pages")
    for block in blocks():
        if not block.is_part_of_page and block.page.name not in UNCHECKED:
            name = f"{block.page.stem}_{block.line}.py".lower()
            (folder / name).write_text("\n" * (block.line - 1) + block.code)
    return sorted(folder.glob("*.py"))


def test_mypy_has_no_objection_to_pages(pages, tmp_path):
    assert len(pages) > 20 and UNCHECKED <= {page.name for page in PAGES}
    untyped = ("--allow-untyped-defs", "--allow-untyped-calls", "--allow-incomplete-defs")
    assert mypy(pages, tmp_path, "--ignore-missing-imports", *untyped) == {}


def test_pyright_has_no_objection_to_pages(pages, tmp_path):
    missing = re.compile(r"^\s*(import|from) (autograd|cupy|jax|keras|optax|torch|horovod)\b", re.MULTILINE)
    found = pyright([page for page in pages if not missing.search(page.read_text())], tmp_path)
    assert [finding for finding in found if finding[2] not in OF_PAGES] == []


# -- wrong programs ---------------------------------------------------------------------------------------------------


def expected(which: int) -> set[Finding]:
    """Return what the comments of the mistakes say: 0 for mypy, 1 for pyright."""
    lines = enumerate(MISTAKES.read_text().splitlines(), 1)
    comments = [(number, line.rpartition("  # ")[2].split()) for number, line in lines if "  # " in line]
    assert all(len(codes) == 2 for _, codes in comments)
    return {(MISTAKES.name, number, codes[which]) for number, codes in comments}


def test_mypy_finds_every_mistake(tmp_path):
    found = mypy([MISTAKES], tmp_path)
    assert set(found) == expected(0)
    assert 'maybe "MirroredStrategy"?' in next(text for text in found.values() if "MirroredStrategie" in text)


def test_pyright_finds_every_mistake(tmp_path):
    assert set(pyright([MISTAKES], tmp_path)) == expected(1)


# -- every public name ------------------------------------------------------------------------------------------------


def public_names(module: ModuleType = mpidist) -> dict[str, object]:
    """Return every public name with its value, as it is at run time."""
    found: dict[str, object] = {}
    for name in module.__all__:
        value = getattr(module, name)
        found.update(public_names(value) if isinstance(value, ModuleType) else {f"{module.__name__}.{name}": value})
    return found


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Return a program that asks the type of every public name, one a line."""
    path = tmp_path_factory.mktemp("names") / "questions.py"
    namespaces = sorted({name.rpartition(".")[0] for name in public_names()})
    lines = [f"import {name}" for name in namespaces] + [f"reveal_type({name})" for name in public_names()]
    path.write_text("\n".join(lines))
    return path


def asked(path: Path, number: int) -> str:
    return path.read_text().splitlines()[number - 1].removeprefix("reveal_type(").removesuffix(")")


def test_pyright_sees_every_name_as_it_is(questions, tmp_path):
    answers = {asked(questions, line): text for (_, line, _), text in pyright([questions], tmp_path).items()}
    assert answers.keys() == public_names().keys()
    for name, value in public_names().items():
        seen = re.fullmatch(r'Type of ".*" is "(.*)"', answers[name].replace("\n", " "))
        assert seen
        if inspect.isclass(value):
            assert seen[1] == f"type[{value.__name__}]", name
        elif callable(value):
            is_any = name.endswith("_loss") or name in ANY
            assert re.match(r"\(.*\) -> (?!Unknown|Any$)", seen[1]) or is_any, (name, seen[1])
        else:
            assert seen[1] in (type(value).__name__, f"Literal[{value}]", f"type[{value}]"), (name, seen[1])


def test_mypy_sees_every_name_as_it_is(questions, tmp_path):
    command = [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", CACHE, questions]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    seen = re.findall(r':(\d+): note: Revealed type is "(.*)"', done.stdout)
    answers = {asked(questions, int(line)): text for line, text in seen}
    assert answers.keys() == public_names().keys(), done.stdout
    for name, value in public_names().items():
        if inspect.isclass(value):
            made = f"{value.__module__}.{value.__qualname__}"
            ends = (f"-> {made}", f", fallback={made}]")  # a named tuple
            assert answers[name].endswith(ends), (name, answers[name])
        else:
            assert answers[name] != "Any", name


# -- editors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed, completion",
    [
        ("import mpidist; mpidist.Mirr", "MirroredStrategy"),
        ("import mpidist; mpidist.optimizers.Ada", "AdamW"),
        ("from mpidist.data import Data", "Dataset"),
        ("import mpidist; mpidist.MirroredStrategy().num_r", "num_replicas_in_sync"),
        ("import mpidist; mpidist.data.Dataset.range(3).shuf", "shuffle"),
        ("import mpidist; mpidist.get_strategy().ga", "gather"),
        ("import mpidist; mpidist.get_replica_context().all_g", "all_gather"),
        ("import mpidist; mpidist.get_replica_context().strategy.num_r", "num_replicas_in_sync"),
        ("import mpidist; mpidist.Variable(0).assign_a", "assign_add"),
    ],
)
def test_editors_complete_names(typed, completion):
    assert completion in {found.name for found in jedi.Script(typed, project=jedi.Project(ROOT)).complete()}


@pytest.mark.parametrize("name", ["Trainer", "MirroredStrategy", "Variable", "data.Dataset.from_csv", "metrics.AUC"])
def test_editors_and_inspect_show_signatures(name):
    value = mpidist
    for part in name.split("."):
        value = getattr(value, part)
    (shown,) = jedi.Script(f"import mpidist\nmpidist.{name}(", project=jedi.Project(ROOT)).get_signatures()
    parameters = list(inspect.signature(value).parameters)
    assert [parameter.name for parameter in shown.params if parameter.name not in ("self", "cls")] == parameters
    assert len(parameters) > 1
