"""Pairs of checkouts without ranks: medians and quartiles over launches, who fails, files, arguments."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy
import pytest

from benchmarks.pairs import command, verdict
from benchmarks.pairs.cases import CASES
from benchmarks.pairs.side import Side, of_servers
from benchmarks.suite.cache_mode import ONE_CACHE, TWO_CACHES
from benchmarks.suite.ps_work import ADAM, MOMENTUM, ONE
from benchmarks.suite.results import Launch
from benchmarks.suite.rows import row_of
from mpidist.errors import LaunchError

ROOT = Path(__file__).resolve().parents[3]


def launches(times, who="mpidist", case="latency", mode=ONE_CACHE):
    found = []
    for time in times:
        base = "Allreduce", 1.0
        rows = [row_of("one array", 4, "float32", who, "ours", [time], base, cache=mode)]
        rows.append(row_of("one array", 4, "float32", "Allreduce", "peer", [1.0], base, cache=mode))
        found.append(Launch(case, [], 2, "An MPI", "1 node", {mode: 1}, rows))
    return found


@pytest.mark.parametrize(
    "old, new, fails",
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], False),
        ([1.0, 1.0, 1.0], [1.09, 1.09, 1.09], False),
        ([1.0, 1.0, 1.0], [1.2, 1.2, 1.2], True),
        ([1.0, 2.0, 3.0], [1.0, 3.0, 5.0], False),
        ([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], False),
    ],
)
def test_a_row_fails_when_it_is_worse_and_quartiles_do_not_overlap(old, new, fails):
    (row,) = verdict.compared(launches(old), launches(new))
    assert row.fails is fails
    assert row.ratio == pytest.approx(numpy.median(new) / numpy.median(old))


def test_a_row_has_quartiles_its_ratio_to_mpi_and_its_cache_modes():
    old = [*launches([1.0, 2.0, 3.0]), *launches([4.0, 5.0], mode=TWO_CACHES)]
    (row,) = verdict.compared(old, launches([2.0]))
    assert (row.old.low, row.old.median, row.old.high) == (2e6, 3e6, 4e6)
    assert (row.old.by_reference, row.new.by_reference, row.reference) == (3.0, 2.0, "Allreduce")
    assert row.old.modes == {ONE_CACHE: 3, TWO_CACHES: 2}


def test_the_report_has_a_geometric_mean_for_each_case_and_lists_who_fails():
    old = [*launches([1.0] * 7), *launches([1.0] * 7, who="other")]
    new = [*launches([4.0] * 7), *launches([1.0] * 7, who="other")]
    text = verdict.report(old, new)
    assert "geometric mean of latency on 2 ranks, new / old: 2.000" in text
    assert text.endswith("# rows that fail: 1 of 2\n#   latency on 2 ranks, one array, 4 B, mpidist")
    assert "too few" not in text and "quartiles need" not in text
    assert "a row has 2 launches: quartiles need 7 or more" in verdict.report(launches([1.0] * 2), launches([1.0] * 2))


def test_a_row_that_one_checkout_alone_has_is_told():
    lines = verdict.missing(launches([1.0], who="gone"), launches([1.0], who="came"))
    assert lines == [
        "# only new: latency on 2 ranks, one array, 4 B, came",
        "# only old: latency on 2 ranks, one array, 4 B, gone",
    ]


def test_servers_have_a_row_for_each_rule_in_the_mode_of_most_looks():
    found = {"seconds": {ONE: [2.0, 1.0, 3.0], MOMENTUM: [4.0], ADAM: [6.0]}, "wrong": {ONE: 0, MOMENTUM: 1, ADAM: 0}}
    launch = of_servers(found, 4, {ONE_CACHE: 2, TWO_CACHES: 7})
    assert [(row.work, row.ratio, row.wrong, row.cache) for row in launch.rows] == [
        *((work, ratio, wrong, TWO_CACHES) for work, ratio, wrong in ((ONE, 1, 0), (MOMENTUM, 2, 1), (ADAM, 3, 0)))
    ]


def test_launches_are_read_as_they_were_written_and_shown_again(tmp_path, capsys):
    path, found = tmp_path / "pairs.json", {"old": launches([1.0] * 7), "new": launches([2.0] * 7)}
    command.write(path, {}, found)
    assert command.read(path) == found
    assert command.main(["--show", str(path)]) == 0
    assert "FAILS" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "another"}', '{"format": "mpidist pairs 1"}'])
def test_a_file_of_something_else_is_refused(text, tmp_path, capsys):
    (tmp_path / "x.json").write_text(text)
    assert command.main(["--show", str(tmp_path / "x.json")]) == 1
    assert "x.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name one of --old and --show"),
        (["--old", "a", "--show", "b"], "name one of --old and --show"),
        (["--old", "a", "--cases", "latencies"], "invalid choice: 'latencies'"),
        (["--old", "a", "--launches", "0"], "expected a whole number, 1 or more"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        command.main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_mpidist_is_refused(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    with pytest.raises(LaunchError, match="old: .* has no folder mpidist"):
        Side("old", tmp_path, own)


def test_a_side_imports_the_mpidist_of_its_checkout(tmp_path):
    checkout, own = tmp_path / "checkout", tmp_path / "own"
    (checkout / "mpidist").mkdir(parents=True)
    (checkout / "mpidist" / "__init__.py").write_text("")
    own.mkdir()
    side = Side("old", checkout, own)
    ended = side._run(["-c", "import benchmarks, mpidist; print(benchmarks.__file__, mpidist.__file__)"], {})
    assert ended.stdout.split() == [str(own / "benchmarks" / "__init__.py"), str(own / "mpidist" / "__init__.py")]


def test_launches_go_over_the_ranks_of_each_case():
    assert command.launches_of(["latency", "ps"], None) == [("latency", 2), ("latency", 4), ("ps", 4)]
    assert command.launches_of(list(CASES), [2]) == [(case, 2) for case in CASES if case != "ps"]


def imported(module, seen):
    """Return the modules of mpidist that a module of the benchmarks imports when it is imported."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if module in seen or not path.exists():
        return set()
    seen.add(module)
    found = set()
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name for name in names if name.split(".")[0] == "mpidist"}
        found |= {each for name in names if name.startswith("benchmarks") for each in imported(name, seen)}
    return found


@pytest.mark.parametrize("module", ["benchmarks.pairs.worker", "benchmarks.suite.ps_job"])
def test_workers_need_only_public_names_so_that_they_run_in_older_checkouts(module):
    found, public = imported(module, set()), {"mpidist", "mpidist.errors", "mpidist.optimizers"}
    assert {name if name in public else name.rpartition(".")[0] for name in found} <= public
    assert "mpidist" in found
