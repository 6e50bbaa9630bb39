"""Nobody writes the ring twice: executor, checker, cost model and simulator all work on the table's generators."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import mpidist
from mpidist.schedules.checker import check
from mpidist.schedules.cost import CostModel, cost, traffic
from mpidist.schedules.rounds import Index, Round, Schedule
from mpidist.schedules.simulator import simulate
from mpidist.schedules.table import ALGORITHMS, algorithm
from tests.helpers.parsed import parsed

PACKAGE = Path(mpidist.__file__).parent
DOCUMENT = Path(__file__).parents[3] / "docs" / "algorithms.md"
CONSUMERS = ("collectives/ways/executor.py", *(f"schedules/{name}.py" for name in ("checker", "cost", "simulator")))
#: The files of generators: all but those of the vocabulary and of what is worked out.
OTHERS = {"__init__", "rounds", "table", "checker", "cost", "simulator", "networks", "figures", "comparison"}
GENERATORS = {path.stem for path in (PACKAGE / "schedules").glob("*.py")} - OTHERS


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of whatever is imported anywhere in a file, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in mpidist"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(tree: ast.AST) -> set[str]:
    """Return the last part of the name of everything that a file calls."""
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {name for function in functions if (name := getattr(function, "attr", getattr(function, "id", None)))}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_consumers_play_schedules_and_write_none(consumer: str) -> None:
    tree = ast.parse((PACKAGE / consumer).read_text("utf-8"))
    called = calls(tree)
    assert "Round" not in called, "rounds are made by the generators only"
    assert called & {"rounds", "rounds_of", "priced"}, "the rounds come from a schedule"


def test_only_the_table_imports_the_generators() -> None:
    generators = tuple(f"mpidist.schedules.{name}" for name in GENERATORS)
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.stem not in GENERATORS
        and any(name.startswith(generators) for name in imported_modules(parsed(path.read_text("utf-8"))))
    }
    assert importers == {"schedules/table.py"}


def test_the_generators_know_nothing_but_rounds_and_topology() -> None:
    allowed = tuple(f"mpidist.{name}." for name in ("cluster.topology", "schedules.rounds"))
    allowed += tuple(f"mpidist.schedules.{name}" for name in GENERATORS)
    for name in GENERATORS:
        tree = parsed((PACKAGE / "schedules" / f"{name}.py").read_text("utf-8"))
        ours = [found for found in imported_modules(tree) if found.startswith("mpidist")]
        assert all(found.startswith(allowed) for found in ours), f"{name} imports {ours}"


def test_schedules_import_nothing_that_communicates() -> None:
    allowed = ("mpidist.schedules.", "mpidist.cluster.topology.", "mpidist.errors.")
    for path in (PACKAGE / "schedules").glob("*.py"):
        ours = [name for name in imported_modules(parsed(path.read_text("utf-8"))) if name.startswith("mpidist")]
        assert all(name.startswith(allowed) for name in ours), f"{path.name} imports {ours}"


def test_every_algorithm_is_documented() -> None:
    headings = [line for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith("#")]
    for collective, name in ALGORITHMS:
        heading = f"`{name}`"
        assert any(heading in line and collective in line for line in headings), f"no section on {collective} {heading}"


def test_the_example_of_the_document_runs() -> None:
    _, *examples = DOCUMENT.read_text("utf-8").split("```python\n")
    assert examples
    for example in examples:
        exec(compile(example.partition("```")[0], str(DOCUMENT), "exec"), {})


MODEL = CostModel.flat(1e-6, 1e-10)
PLAYERS: dict[str, Callable[[Schedule], object]] = {
    "checker": lambda schedule: check(schedule, 4),
    "cost": lambda schedule: cost(schedule, 4, 100, MODEL),
    "traffic": lambda schedule: traffic(schedule, 4, 100),
    "simulator": lambda schedule: simulate(schedule, 4, 100, MODEL),
}


@pytest.mark.parametrize("player", PLAYERS)
def test_what_is_played_is_what_the_generator_yields(player: str) -> None:
    ring, yielded = algorithm("all_reduce", "ring"), []

    def recorded(rank: Index, size: int) -> Iterator[Round]:
        for round_ in ring.rounds(rank, size):
            yielded.append(round_)
            yield round_

    PLAYERS[player](replace(ring, rounds=recorded))
    assert yielded, f"the {player} did not ask the schedule for its rounds"
