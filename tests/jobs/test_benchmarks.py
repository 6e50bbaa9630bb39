"""The benchmarks with real ranks: its tables and files, all peers that are there, every subcommand once."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import pytest

from benchmarks.peers.table import PEERS
from benchmarks.suite import results
from benchmarks.suite.cache_mode import MODES
from benchmarks.suite.collectives import COLLECTIVES
from benchmarks.suite.ps_work import ADAM, MOMENTUM, ONE
from mpidist.commands.launch.probe import without_launcher
from tests.helpers.launch import ROOT, run_command, run_process

pytestmark = pytest.mark.measures

#: As little as can be measured.
LITTLE = ("--seconds", "0.01", "--rounds", "3")


def bench(*arguments, timeout_seconds=300):
    environ = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT)}
    return run_process([sys.executable, "-m", "benchmarks", *arguments], environ, timeout_seconds)


def rows_of(path):
    return [row for launch in results.read(path) for row in launch.rows]


def test_gradients_started_by_the_command_itself(tmp_path):
    path = tmp_path / "found.json"
    result = bench("gradients", "-n", "2", "--model", "small", *LITTLE, "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert "# small: 1000 tensors, 256000 elements" in result.stdout
    assert "cache mode: " in result.stdout
    (launch,) = results.read(path)
    assert (launch.subcommand, launch.ranks) == ("gradients", 2)
    assert sum(launch.looks.values()) > 3
    rows = {row.who: row for row in launch.rows}
    assert {"copy", "mpidist"} <= set(rows)
    assert rows["copy"].wrong is None
    assert rows["mpidist"].wrong == 0
    assert all(row.count == 256000 for row in launch.rows)


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_started_by_a_launcher(ranks):
    command = [sys.executable, "-m", "benchmarks", "gradients", "--model", "small", *LITTLE]
    result = run_command(ranks, command, timeout_seconds=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" mpidist ") == 1, "rank 0 prints, and nobody else"


def test_peers_run_or_say_why_not(tmp_path):
    path = tmp_path / "found.json"
    result = bench("gradients", "-n", "2", "--model", "small", "--peers", *LITTLE, "--json", str(path))
    assert result.returncode == 0, result.stderr
    (launch,) = results.read(path)
    ran = {row.who: row.wrong for row in launch.rows if row.kind == "peer"}
    assert ran.keys() | launch.missing.keys() == {peer.name for peer in PEERS}
    assert set(ran.values()) == {0}
    for who, why in launch.missing.items():
        assert f"# without {who}: {why}\n" in result.stdout
    if importlib.util.find_spec("torch") is None:
        assert launch.missing["Gloo flat"] == "needs PyTorch: pip install torch"
    else:
        assert {"Gloo flat", "Gloo each", "Gloo DDP"} <= ran.keys()
    if importlib.util.find_spec("tensorflow") is None:
        assert launch.missing["TensorFlow RING"] == "needs TensorFlow: pip install tensorflow-cpu"
    else:
        assert "TensorFlow RING" in ran


def test_sizes_by_the_public_call_and_by_algorithms(tmp_path):
    path = tmp_path / "found.json"
    words = ("--largest", "1024", "--algorithms", "auto,shared_memory,ring,no_such", "--link-mbit", "100")
    result = bench("all-reduce", "-n", "2", *words, *LITTLE, "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = rows_of(path)
    assert {row.size for row in rows} == {4 * 4**power for power in range(5)}
    assert {row.who for row in rows if row.size == 4} == {
        *("copy", "Allreduce", "mpidist", "auto", "shared_memory", "ring", "bound of the link")
    }
    assert {row.wrong for row in rows if row.kind != "reference"} == {0}
    assert "# without OursByAlgorithm no_such: ValueError" in result.stdout


def test_whole_steps_end_where_the_rules_say(tmp_path):
    path = tmp_path / "found.json"
    result = bench("step", "-n", "2", "--model", "small", "--peers", *LITTLE, "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = rows_of(path)
    assert {row.work for row in rows} == {"small sgd", "small adam"}
    assert {"apply_gradients", "mpidist, textbook", "blocked update alone"} <= {row.who for row in rows}
    assert {row.wrong for row in rows} == {0}


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_collectives(ranks, tmp_path):
    path = tmp_path / "found.json"
    words = ("--sizes", "4", "1000", "40000")
    result = bench("collectives", "-n", str(ranks), *words, *LITTLE, "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = rows_of(path)
    assert {row.work for row in rows} == set(COLLECTIVES)
    assert {row.wrong for row in rows if row.work != "barrier"} == {0}


def test_scaling_and_launches_and_the_picture(tmp_path):
    words = ("--model", "small", "--ranks", "1", "2", "--launches", "2")
    result = bench("scaling", *words, *LITTLE, "--json", str(tmp_path / "found.json"))
    assert result.returncode == 0, result.stderr
    assert [launch.ranks for launch in results.read(tmp_path / "found.json")] == [1, 1, 2, 2]
    table = result.stdout[result.stdout.index("#  ranks") :].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["1", "2"]


def test_several_launches_are_summed_up():
    result = bench("collectives", "-n", "2", "--which", "barrier", "--launches", "2", *LITTLE)
    assert result.returncode == 0, result.stderr
    assert "# launch 2 of 2, 2 ranks" in result.stdout
    seen = [mode for mode in MODES if f"collectives on 2 ranks, {mode}: medians over" in result.stdout]
    assert seen or "changed: medians over" in result.stdout or "unknown: medians over" in result.stdout


def test_a_rank_that_fails_ends_the_benchmark():
    result = bench("gradients", "-n", "2", "--model", "small", "--dtype", "S3", *LITTLE)
    assert result.returncode == 1
    assert "rank 0 failed first" in result.stderr or "rank 1 failed first" in result.stderr
    assert result.stderr.endswith("ended with status 1 before it had a result\n")


def test_steps_on_parameter_servers(tmp_path):
    path = tmp_path / "found.json"
    result = bench("ps", "--seconds", "0.01", "--rounds", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    (launch,) = results.read(path)
    assert {(row.work, row.who) for row in launch.rows} == {
        *((work, who) for work in (ONE, MOMENTUM, ADAM, "4 MB") for who in ("mpidist", "messages of MPI")),
        *(("200 variables of 1 KB", who) for who in ("200 variables of 1 KB", "1 variable of 200 KB")),
        *(("64 MB", who) for who in ("2 servers", "1 server")),
    }
    assert {row.wrong for row in launch.rows} == {0}, "updates were lost"
    held = list(launch.machine["server_bytes"].values())
    assert len(held) == 2 and sum(held) == 1 << 26
    assert max(held) <= 1.05 * sum(held) / 2
    assert "servers hold" in result.stdout and "two servers against one" in result.stdout


def test_small_variables_end_where_the_rule_says(tmp_path):
    path = tmp_path / "found.json"
    result = bench("small-variables", "-n", "2", *LITTLE, "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = rows_of(path)
    assert {row.work for row in rows} == {"1000 variables of 400 B", "1000 variables of 2048 B"}
    assert {row.who for row in rows} == {"apply_gradients", "mpidist, flat update", "mpidist, textbook"}
    assert {row.wrong for row in rows} == {0}


def test_first_steps_and_later_ones(tmp_path):
    path = tmp_path / "found.json"
    result = bench("first-steps", "-n", "2", "--model", "small", "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = rows_of(path)
    assert [(row.work, row.turns) for row in rows if row.kind == "ours"] == [
        *(("small, steps 1 to 20", 20), ("small, steps 100 to 120", 21))
    ]
    assert {row.wrong for row in rows} == {0}


def test_pairs_of_this_checkout_and_itself(tmp_path):
    path = tmp_path / "pairs.json"
    words = ("--launches", "1", "--seconds", "0.1", "--ranks", "2", "--cases", "latency", "--json", str(path))
    result = bench("pairs", "--old", str(ROOT), *words)
    assert result.returncode == 0, result.stderr
    assert "geometric mean of latency on 2 ranks" in result.stdout
    assert "one array, 4 B, mpidist" in result.stdout
    assert bench("pairs", "--show", str(path)).returncode == 0


def test_calls_of_a_short_gradient_are_counted(tmp_path):
    path = tmp_path / "calls.json"
    script = ROOT / "benchmarks" / "count_calls.py"
    result = run_command(2, [sys.executable, str(script), "--json", str(path)], timeout_seconds=300)
    assert result.returncode == 0, result.stderr
    for count in json.loads(path.read_text())["lists"].values():
        assert count["calls"] == len(count["names"]) >= count["functions"] >= count["files"] > 1
        assert 0 < count["board_depth"] <= count["depth"] <= count["calls"]
        assert sum(name.endswith(":all_reduce") for name in count["names"]) >= 1
