"""``mpidist simulate``: arguments, the table, and JSON."""

from __future__ import annotations

import json

import pytest

from mpidist import transports
from mpidist.cluster.topology import Topology
from mpidist.commands.main import main
from mpidist.commands.simulate import placed
from mpidist.commands.simulate_measure import Comparison, comparison_table, measure, verdict
from mpidist.schedules.comparison import candidates
from mpidist.schedules.cost import CostModel, Level
from mpidist.schedules.figures import Figures
from mpidist.schedules.networks import NETWORKS
from mpidist.schedules.table import names
from mpidist.testing import run_ranks
from mpidist.tuning.store import Record, write

FIGURES = ["--alpha-intra", "1us", "--beta-intra", "10GB/s", "--alpha-inter", "1us", "--beta-inter", "10GB/s"]


def printed(capsys, *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def as_json(capsys, *arguments: str) -> dict:
    return json.loads(printed(capsys, *arguments, "--json"))


def complaint(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["simulate", *arguments])
    assert left.value.code == 2
    return capsys.readouterr().err


def test_the_table_has_every_algorithm_and_marks_the_best(capsys):
    lines = printed(capsys, "--nodes", "4", "--ranks-per-node", "2", "--bytes", "1MB", *FIGURES).splitlines()
    assert lines[0] == "all_reduce of 1 MB on 4 nodes x 2 ranks, 8 in all"
    rows = [line.split() for line in lines[lines.index("") + 2 :]]
    assert {row[0] for row in rows} >= {*names("all_reduce"), "hierarchical_ring"}
    assert [row[-1] for row in rows].count("best") >= 1 and rows[0][-1] == "best"


def test_seconds_are_the_closed_form_of_the_given_figures(capsys):
    """A ring of 4 ranks on one node: 6 rounds of a quarter of the buffer, 3 of which are reduced."""
    found = as_json(
        capsys,
        "--nodes",
        "1",
        "--ranks-per-node",
        "4",
        "--bytes",
        "4MB",
        "--algorithm",
        "ring",
        "--gamma",
        "20GB/s",
        *FIGURES,
    )
    (ring,) = found["outcomes"]
    assert ring["seconds"] == pytest.approx(6 * (1e-6 + 1e6 / 10e9) + 3 * 1e6 / 20e9)
    assert (ring["rounds"], ring["bytes_per_rank"], ring["bytes_per_link"]) == (6, 6e6, 0)
    assert (found["best"], found["ranks"], found["nodes"], found["bytes"]) == ("ring", 4, 1, 4_000_000)


def test_hosts_and_placement(capsys):
    found = as_json(capsys, "--hosts", "n[1-2]:2,big:4", "--placement", "cyclic", *FIGURES)
    assert (found["ranks"], found["nodes"]) == (8, 3)
    assert found["topology"] == "3 nodes: 2+2+4 ranks, cyclic"


@pytest.mark.parametrize(
    "placement, hosts", [("block", ["a", "a", "b", "c", "c", "c"]), ("cyclic", ["a", "b", "c", "a", "c", "c"])]
)
def test_how_ranks_are_dealt_to_hosts(placement, hosts):
    assert placed([("a", 2), ("b", 1), ("c", 3)], placement) == hosts


def test_a_link_for_each_rank_is_faster_than_one_for_all(capsys):
    common = ["--nodes", "4", "--ranks-per-node", "4", "--algorithm", "hierarchical_ring", *FIGURES]
    one, four = (as_json(capsys, *common, "--links-per-node", links)["outcomes"][0] for links in "14")
    assert four["seconds"] < one["seconds"]
    assert four["bytes_per_link"] == pytest.approx(one["bytes_per_link"] / 4)


def test_other_collectives(capsys):
    assert as_json(capsys, "--collective", "broadcast")["best"] == "binomial"


def test_the_networks_are_listed_with_their_sources(capsys):
    page = printed(capsys, "--networks")
    assert all(network.name in page and network.source in page for network in NETWORKS.values())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--network", "token-ring"], "token-ring"),
        (["--network", "infiniband-ndr"], "--alpha-inter"),
        (["--algorithm", "rings"], "known ones: ring,"),
        (["--nodes", "0"], "1 or more"),
        (["--nodes", "2000000"], "are more than the"),
        (["--bytes", "many"], "a size such as"),
        (["--jitter", "-1"], "from 0 to 10"),
        (["--seed", "-1", "--jitter", "0.1"], "'-1': expected a whole number, 0 or more"),
        (["--hosts", "a:none"], "number of ranks"),
        (["--hosts", "n[3-1]"], "runs backwards"),
        (["--hosts", "n[1"], "cannot read"),
    ],
)
def test_what_cannot_be_simulated_is_said(capsys, arguments, words):
    assert words in complaint(capsys, *arguments)


def test_100_000_ranks(capsys):
    found = as_json(capsys, "--nodes", "12500", "--ranks-per-node", "8", "--network", "ethernet-10g")
    assert found["ranks"] == 100_000
    assert len(found["outcomes"]) == len(names("all_reduce")) + 3


# -- measured figures --------------------------------------------------------------------------------------------------


KEY = {"processor": "Some CPU", "mpi": "some MPI", "shared_memory": True, "algorithms": ["ring"]}


def test_stored_figures_take_the_place_of_presets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPIDIST_TUNING_FOLDER", str(tmp_path))
    assert "holds the figures of 0 sets of ranks" in complaint(capsys, "--figures")
    model = CostModel(Level(1e-6, 1e-9), Level(2e-6, 1e-9), links_per_node=3)
    path = write(Record({**KEY, "ranks": "2 nodes x 1 rank"}, ("a", "b"), Figures(model, {})), tmp_path)
    for arguments in (["--figures"], ["--figures", str(path)]):
        found = as_json(capsys, *arguments, "--nodes", "2", "--ranks-per-node", "1", "--bytes", "2KB")
        by_name = {outcome["algorithm"]: outcome["seconds"] for outcome in found["outcomes"]}
        assert by_name["ring"] == pytest.approx(2 * (2e-6 + 1e-6))
        assert found["model"]["links_per_node"] == 3
    assert "as stored" in printed(capsys, "--figures")
    write(Record({**KEY, "ranks": "3 nodes x 1 rank"}, ("a", "b", "c"), Figures(model, {})), tmp_path)
    message = complaint(capsys, "--figures")
    assert "2 sets of ranks" in message and str(path) in message and "3 nodes x 1 rank" in message


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_figures_that_cannot_be_read_are_named(content, tmp_path, capsys):
    path = tmp_path / "figures.json"
    if content is not None:
        path.write_text(content)
    assert str(path) in complaint(capsys, "--figures", str(path))


def test_measuring_needs_ranks(capsys, monkeypatch):
    monkeypatch.setenv("MPIDIST_NO_MPI", "1")
    transports.forget()
    assert main(["simulate", "--measure"]) == 2
    assert "mpidist run -n 2 -m mpidist simulate --measure" in capsys.readouterr().err


@pytest.mark.parametrize("hosts, sizes", [("aa", (1024, 4096)), ("ab", (1024, 4096)), ("aab", (1024,))])
def test_every_schedule_is_predicted_and_measured(hosts, sizes, capsys):
    run_ranks(len(hosts), lambda: measure(True, sizes[-1]), hosts=list(hosts))
    found = json.loads(capsys.readouterr().out)  # rank 0 alone has printed
    assert found["ranks"] == len(hosts)
    pairs = {(each["algorithm"], each["bytes"]) for each in found["comparisons"]}
    schedules = candidates("all_reduce", Topology(hosts))
    assert pairs == {(schedule.name, nbytes) for schedule in schedules for nbytes in sizes}
    for each in found["comparisons"]:
        assert each["measured"] > 0 and each["predicted"] > 0
        assert each["deviation"] == pytest.approx(each["predicted"] / each["measured"] - 1)
    assert found["command"][:3] == ["run", "-n", str(len(hosts))] and found["machine"]["date"].startswith("20")


def test_the_verdict_counts_what_is_on_target_and_names_the_worst():
    found = [
        Comparison("ring", 1024, 11e-6, 10e-6),
        Comparison("ring", 4096, 20e-6, 40e-6),
        Comparison("binomial", 4096, 46e-6, 40e-6),
    ]
    assert verdict(found, crowded=False) == "2 of 3 within 15%, the worst off by -50% (ring of 4.1 KB)"
    assert verdict(found, crowded=True).endswith("ranks outnumber cores, so no prediction is meant to hold")
    shown = comparison_table(found).splitlines()
    assert shown[1].split() == ["ring", "1.02", "KB", "11", "us", "10", "us", "+10", "%"]
