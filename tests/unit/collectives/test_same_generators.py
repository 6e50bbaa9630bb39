"""Nobody writes the ring twice: executor, checker, cost model and simulator all work on the table's generators."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import mpidist.collectives.algorithms
from mpidist.collectives.algorithms import ALGORITHMS, algorithm
from mpidist.collectives.checker import check
from mpidist.collectives.cost import CostModel, cost, traffic
from mpidist.collectives.rounds import Index, Round, Schedule
from mpidist.collectives.simulator import simulate
from tests.parsed import parsed

COLLECTIVES = Path(mpidist.collectives.algorithms.__file__).parent
PACKAGE = COLLECTIVES.parent
DOCUMENT = Path(__file__).parents[3] / "docs" / "algorithms.md"
SCHEDULES = "mpidist.collectives.schedules"
CONSUMERS = ("executor", "checker", "cost", "simulator")


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
    tree = ast.parse((COLLECTIVES / f"{consumer}.py").read_text("utf-8"))
    called = calls(tree)
    assert "Round" not in called, "rounds are made by the generators in schedules/ only"
    assert called & {"rounds", "rounds_of", "priced"}, "the rounds come from a schedule"


def test_only_the_table_imports_the_schedules() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if COLLECTIVES / "schedules" not in path.parents]
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in files
        if any(name.startswith(SCHEDULES) for name in imported_modules(parsed(path.read_text("utf-8"))))
    }
    assert importers == {"collectives/algorithms.py"}


def test_the_schedules_know_nothing_but_rounds_and_topology() -> None:
    allowed = ("mpidist.collectives.rounds.", "mpidist.cluster.topology.", f"{SCHEDULES}.")
    for path in (COLLECTIVES / "schedules").glob("*.py"):
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
