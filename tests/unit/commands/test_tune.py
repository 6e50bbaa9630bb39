"""``mpidist tune`` and the choices that ``mpidist info`` shows: arguments, and what the page says."""

from __future__ import annotations

import os
import platform

import pytest

from mpidist.cluster.topology import Topology
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.selection import Facts
from mpidist.commands import choice_page, info, tune
from mpidist.schedules.cost import CostModel, Level
from mpidist.schedules.figures import Figures, ImplausibleFigures
from mpidist.testing import run_ranks
from mpidist.tuning.store import Record, read, write

MODEL = CostModel(Level(2e-6, 1e-10, 5e-11), Level(30e-6, 8e-10, 5e-11))
TAKEN = {"shared_memory": 50e-6, "native": 20e-6, "recursive_doubling": 30e-6, "ring": 90e-6}


def record(host="n1", hosts=None, **taken):
    hosts = (host, host) if hosts is None else hosts
    names = [*{**TAKEN, **taken}]
    key = {
        "hosts": sorted(set(hosts)),
        "ranks": Topology(hosts).describe(),
        "mpi": "Some MPI 1.2",
        "processor": "Some CPU",
    }
    key |= {"shared_memory": len(set(hosts)) == 1, "algorithms": names}
    points = {name: ((4096.0, seconds),) for name, seconds in {**TAKEN, **taken}.items()}
    return Record(key, hosts, Figures(MODEL, points))


def row(text, nbytes):
    (found,) = [line for line in text.splitlines() if line.split()[:1] == [str(nbytes)]]
    return found.split()


def test_the_page_says_what_is_chosen_with_the_seconds_of_all_candidates_and_why():
    text = choice_page.page(record())
    assert text.startswith("1 node x 2 ranks (n1), Some MPI 1.2, Some CPU")
    assert row(text, 4096) == "4096 native 50 us 20 us 30 us 90 us quickest".split()
    assert "inside a node" in text and "between nodes" not in text
    assert "10 GB/s" in text and "20 GB/s" in text  # 1 / beta and 1 / gamma


def test_the_page_says_when_the_fixed_table_stands():
    text = choice_page.page(record(native=49e-6, recursive_doubling=90e-6))
    assert " ".join(row(text, 4096)).endswith("native is hardly quicker, within the noise")
    assert row(text, 4096)[1] == "shared_memory"


def test_between_nodes_the_page_has_both_levels_and_the_unit():
    found = record(hosts=("n1", "n1", "n2", "n2"))
    text = choice_page.page(found)
    assert "inside a node" in text and "between nodes" in text
    assert "2 nodes x 2 ranks (n1, n2)" in text and "units of" in text


def test_every_size_of_the_page_shows_what_is_chosen():
    found = record()
    facts = found.facts()
    known = selection.worked_out(found.figures, facts)
    text = choice_page.choices(found.figures, facts)
    for nbytes in choice_page.SIZES:
        assert row(text, nbytes)[1] == known.algorithm(nbytes, True)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_TUNING_FOLDER", str(tmp_path))
    monkeypatch.setattr(info, "detect_launcher", lambda: None)
    return tmp_path


def test_info_shows_all_that_was_measured_of_this_host(alone):
    write(record(platform.node()), alone)
    write(record(hosts=(f"{platform.node()}#0", f"{platform.node()}#1")), alone)
    write(record("elsewhere"), alone)
    pages = info.all_reduces()
    assert len(pages) == 2 and all(page.startswith("all-reduces of ") for page in pages)
    assert not any("elsewhere" in page for page in pages)


def test_info_says_that_nothing_was_measured_and_how_to(alone):
    (page,) = info.all_reduces()
    assert "mpidist tune -n 2" in page and str(alone) in page


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ALGORITHM", "ring", "always ring, by MPIDIST_ALGORITHM"),
        ("DETERMINISTIC", "1", "MPIDIST_DETERMINISTIC"),
        ("DETERMINISTIC", "maybe", "expected 0 or 1"),
    ],
)
def test_info_says_when_a_setting_decides(alone, monkeypatch, variable, value, said):
    monkeypatch.setenv(f"MPIDIST_{variable}", value)
    (page,) = info.all_reduces()
    assert said in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "-n RANKS is needed"),
        (["--largest", "1000"], "--largest must be 64KiB or more, got 1000"),
        (["--largest", "much"], "expected a size"),
        (["--seconds", "soon"], "expected a time"),
        (["-n", "two"], "mpidist tune: error: argument -n/-np/--ranks: 'two': expected a whole number, 1 or more"),
        (["-n", "0"], "mpidist tune: error: argument -n/-np/--ranks: '0': expected a whole number, 1 or more"),
        (["--fast"], "there is no option --fast; "),
    ],
)
def test_arguments_that_cannot_be(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(tune, "detect_launcher", lambda: None)
    with pytest.raises(SystemExit) as left:
        tune.main(arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_the_ranks_get_what_the_command_got(monkeypatch):
    started = []
    monkeypatch.setattr(tune.run, "main", lambda argv: started.append(list(argv)) or 7)
    assert tune.main(["-n", "3", "--largest", "1MiB", "--seconds", "2", "--json", "--dry-run"]) == 7
    (argv,) = started
    assert argv[:8] == ["--site", os.devnull, "--quiet", "-n", "3", "-m", "mpidist", "tune"]
    again = tune.parser().parse_args(argv[8:])
    assert (again.ranks, again.largest, again.seconds, again.json, again.dry_run) == (None, 1 << 20, 2.0, True, True)


@pytest.fixture
def tuning(monkeypatch, tmp_path):
    """Run the command on two ranks, with figures in place of measuring; return exit statuses."""
    monkeypatch.setattr(tune, "detect_launcher", lambda: object())
    monkeypatch.setenv("MPIDIST_TUNING_FOLDER", str(tmp_path / "kept"))

    def run(calibrate):
        monkeypatch.setattr(tune, "calibrate", calibrate)
        return run_ranks(2, tune.main, [])

    return run


def test_figures_are_kept_and_said_once(tuning, tmp_path, capsys):
    assert tuning(lambda *_: record().figures) == [0, 0]
    (path,) = (tmp_path / "kept").iterdir()
    assert capsys.readouterr().out.count(f"kept in {path}") == 1
    assert read(path).figures == record().figures


def test_a_disturbed_calibration_is_refused_and_not_kept(tuning, tmp_path, capsys):
    def calibrate(*_):
        raise ImplausibleFigures("ring of 8 bytes took 4.0 times as long")

    assert tuning(calibrate) == [1, 1]
    said = capsys.readouterr().err
    assert said.count("mpidist tune: ring of 8 bytes took 4.0 times as long; nothing is kept") == 1
    assert "run mpidist tune again" in said and not (tmp_path / "kept").exists()


def test_figures_of_no_machine_are_refused_and_not_kept(tuning, tmp_path, capsys):
    assert tuning(lambda *_: Figures(CostModel.flat(1e-6, 1 / 372e3), {})) == [1, 0]
    assert "an exchange inside a node of 1073741824 bytes takes" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()


def test_info_says_which_file_is_refused_and_why(alone):
    path = write(Record(record().key, record().hosts, Figures(CostModel.flat(1e-6, 1 / 372e3), {})), alone)
    (page,) = info.all_reduces()
    assert str(path) in page and "3.72e+05 bytes a second" in page and "mpidist tune measures anew" in page


def test_the_page_shows_the_sizes_of_segments():
    segments = {1 << 18: ((4194304.0, 2e-3),), 1 << 20: ((4194304.0, 3e-3),)}
    figures = Figures(MODEL, record().figures.points, segments, 1 << 18)
    text = choice_page.page(Record(record().key, record().hosts, figures))
    assert " ".join(text.splitlines()[-2].split()) == "4194304 2 ms 3 ms"
    assert text.splitlines()[-1] == "segments of 256 KiB: clearly quicker than those of the table"
    text = choice_page.page(Record(record().key, record().hosts, Figures(MODEL, record().figures.points, segments)))
    assert text.splitlines()[-1] == "segments of 1024 KiB: no other size is clearly quicker"


def test_the_table_is_shown_with_what_its_rows_follow_from():
    text = choice_page.table_page(record().facts())
    row_of_node = selection.row_of(0, record().facts())
    assert " ".join(text.splitlines()[-1].split()) == f"0 shared_memory up to 16 {row_of_node.files}"


def test_the_table_says_where_there_are_more_ranks_than_were_measured():
    text = choice_page.table_page(Facts(Topology("a" * 17), ("all_reduce",), has_segments=True))
    assert "shared_memory  up to 16        not measured on more than 16 ranks: all-reduce-openmpi-2.json" in text
    text = choice_page.table_page(Facts(Topology("abcd"), ("all_reduce",), has_segments=True))
    assert [line.split()[1:] for line in text.splitlines()[-2:]] == [
        [each, "-", "not", "measured"] for each in ("native", "ring")
    ]


def test_one_rank_has_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr(tune, "detect_launcher", lambda: object())
    monkeypatch.setenv("MPIDIST_NO_MPI", "1")
    assert tune.main([]) == 2
    assert "mpidist tune -n 2" in capsys.readouterr().err
