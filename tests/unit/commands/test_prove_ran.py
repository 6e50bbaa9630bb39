"""A parallel test that is skipped at every size is found."""

from __future__ import annotations

import json

from tests.parallel.prove_ran import main, never_ran


def log(collected, passed):
    return {"collected": collected, "passed": passed}


def test_tests_that_never_ran_are_found():
    assert never_ran({"1": log(["a", "b", "c"], ["a"]), "2": log(["a", "b", "c"], ["a", "b"])}) == ["c"]
    assert never_ran({"1": log(["a"], []), "2": log(["a"], ["a"])}) == []


def write(directory, size, collected, passed):
    directory.mkdir(exist_ok=True)
    (directory / f"{size}.json").write_text(json.dumps(log(collected, passed)))
    return str(directory)


def test_a_run_that_proves_all_passes(tmp_path, capsys):
    write(tmp_path / "ran", 1, ["a", "b"], ["a"])
    assert main([write(tmp_path / "ran", 8, ["a", "b"], ["b"])]) == 0
    assert "1 on 1, 1 on 8" in capsys.readouterr().out


def test_a_test_that_never_ran_fails_and_is_named(tmp_path, capsys):
    assert main([write(tmp_path / "ran", 2, ["a", "b"], ["a"])]) == 1
    assert "never ran: b" in capsys.readouterr().out


def test_a_test_without_ranks_that_was_skipped_fails_too(tmp_path, capsys):
    assert main([write(tmp_path / "slurm", 0, ["a"], ["a"])]) == 0
    assert "1 without ranks" in capsys.readouterr().out
    assert main([write(tmp_path / "slurm", 0, ["a", "b"], ["a"])]) == 1
    assert "never ran: b" in capsys.readouterr().out


def test_no_test_at_all_fails(tmp_path):
    assert main([str(tmp_path)]) == 1
    assert main([write(tmp_path / "ran", 1, ["a"], [])]) == 1


def test_another_launcher_s_run_may_prove_a_test_but_not_all(tmp_path):
    first = write(tmp_path / "first", 8, ["a", "b"], ["a", "b"])
    assert main([first, write(tmp_path / "second", 1, ["a", "b"], ["a"])]) == 0
    assert main([first, write(tmp_path / "third", 1, ["a", "b"], [])]) == 1
