"""``mpidist bench`` without ranks: its arguments and its table."""

from __future__ import annotations

import os

import pytest

from mpidist.commands import bench
from mpidist.commands.main import main


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gradients"], "there is no argument gradients; "),
        (["-n", "0"], "expected a whole number, 1 or more"),
        (["--sizes", "3"], "'3': expected a size of 4 bytes or more"),
        (["--sizes", "large"], "a size such as 4096, 100MB or 64KiB"),
        (["--rounds", "none"], "expected a whole number"),
        (["--sizes", "--no-list"], "nothing is left to measure"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing/x.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(name, capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        main(["bench", "--json", str(tmp_path / name)])
    assert left.value.code == 2
    assert "cannot be written; name a file in a folder that there is" in capsys.readouterr().err


def test_a_rank_starts_no_ranks(capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as left:
        main(["bench", "-n", "2"])
    assert left.value.code == 2
    assert "this process is a rank already" in capsys.readouterr().err


def test_options_are_passed_to_the_ranks(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(bench, "detect_launcher", lambda: None)
    monkeypatch.setattr(bench.run, "main", lambda words: started.append(words) or 7)
    monkeypatch.chdir(tmp_path)
    words = ["-n", "3", "--sizes", "4", "64KiB", "--no-list", "--rounds", "5", "--json", "x.json"]
    assert main(["bench", *words]) == 7
    (line,) = started
    assert line[:8] == ["--site", os.devnull, "--quiet", "-n", "3", "-m", "mpidist", "bench"]
    options = bench.parser().parse_args(line[8:])
    assert (options.sizes, options.no_list, options.rounds) == ([4, 65536], True, 5)
    assert options.json == tmp_path / "x.json" and options.ranks is None


def test_a_noisy_machine_is_told():
    def row(low, high):
        return bench.Timing("array", 1, 1024, "mpidist", 0.02, low, high, 0.5, 0)

    assert bench.noise([row(0.01, 0.02), row(0.02, 0.03)]) == ""
    told = bench.noise([row(0.01, 0.02), row(6e-6, 387e-6), row(0.01, 0.021)])
    assert told.startswith("# noisy: in 2 of 3 rows the upper quartile is more than 2 times the lower one")


def test_a_row_of_the_table_has_time_quartiles_speed_and_ratio():
    row = bench.Timing("list", 160, 10**8, "mpidist", 0.02, 0.01, 0.04, 0.5, 0)
    assert bench.line(row).split() == [
        *("160", "100", "MB", "mpidist", "20", "ms", "10", "ms", "-", "40", "ms", "5.00", "0.50", "0")
    ]
    assert len(bench.heading()) == len(bench.line(row))
