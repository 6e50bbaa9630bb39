"""The store of figures, and when a launch looks into it, measures, or does neither."""

from __future__ import annotations

import json
import os

import numpy
import pytest

from mpidist.cluster.topology import Topology
from mpidist.collectives import tuning
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.fused import FusedAllReduce
from mpidist.collectives.tuning import Record, folder, look_up, path_of, read, stored, write
from mpidist.collectives.update import FusedUpdate
from mpidist.errors import CollectiveMismatchError
from mpidist.options import Settings
from mpidist.schedules.cost import CostModel
from mpidist.schedules.figures import Figures
from mpidist.testing import run_ranks

LIBRARY = "Some MPI 1.2.3"
KEY = {
    "hosts": ["a"],
    "ranks": "1 node x 2 ranks",
    "mpi": LIBRARY,
    "shared_memory": True,
    "algorithms": ["shared_memory", "recursive_doubling", "ring"],
}

#: An all-reduce of so many float32 is long enough to measure for; one of ten is not.
LONG = 1 << 16


def figures(**seconds):
    return Figures(CostModel.flat(1e-6, 1e-9), {name: ((4.0, taken),) for name, taken in seconds.items()})


RECORD = Record(KEY, ("a", "a"), "mpidist tune", figures(shared_memory=9.0, recursive_doubling=5.0, ring=1.0))


@pytest.fixture
def where(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_TUNING_FOLDER", str(tmp_path / "tuning"))
    return tmp_path / "tuning"


@pytest.fixture
def measuring(monkeypatch):
    """Give measured figures without measuring; return the list of the ranks that asked for them."""
    asked = []

    def calibrate(communicator):
        asked.append(communicator.rank)
        return RECORD.figures

    monkeypatch.setattr(tuning, "calibrate", calibrate)
    return asked


# -- the store --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path):
    path = write(RECORD, tmp_path / "new" / "folder")
    assert path == path_of(KEY, tmp_path / "new" / "folder")
    assert read(path) == RECORD
    assert look_up(KEY, path.parent) == (RECORD, "")
    assert stored(path.parent) == [RECORD]
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    "change", [{"hosts": ["b"]}, {"ranks": "1 node x 3 ranks"}, {"mpi": "Some MPI 1.2.4"}, {"shared_memory": False}]
)
def test_other_ranks_have_a_file_of_their_own(tmp_path, change):
    write(RECORD, tmp_path)
    assert look_up({**KEY, **change}, tmp_path) == (None, "")


def test_nothing_is_stored_in_a_folder_that_is_not_there(tmp_path):
    assert look_up(KEY, tmp_path / "none") == (None, "")
    assert stored(tmp_path / "none") == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"format": 0}', '{"format": 1}', "\x00\xff"])
def test_a_damaged_file_is_said_so(tmp_path, text):
    path = path_of(KEY, tmp_path)
    path.write_bytes(text.encode("latin-1"))
    record, problem = look_up(KEY, tmp_path)
    assert record is None
    assert str(path) in problem and "cannot be used" in problem
    assert stored(tmp_path) == []


@pytest.mark.parametrize("name", ["key", "hosts", "measured_by", "figures"])
@pytest.mark.parametrize("value", [None, 3, [], {}, "x"])
def test_a_file_with_something_else_in_a_place_is_no_crash(tmp_path, name, value):
    path = write(RECORD, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    record, problem = look_up(KEY, tmp_path)
    assert (record is None) == bool(problem)
    if record is not None:
        assert record.key == KEY and record.facts().topology.size >= 1


def test_a_file_of_other_ranks_under_this_name_is_not_used(tmp_path):
    path_of(KEY, tmp_path).write_text(write(Record({**KEY, "hosts": ["b"]}, *_rest()), tmp_path).read_text())
    record, problem = look_up(KEY, tmp_path)
    assert record is None and "are of other ranks" in problem


def _rest():
    return RECORD.hosts, RECORD.measured_by, RECORD.figures


def test_a_file_that_cannot_be_replaced_leaves_no_piece_behind(tmp_path):
    path_of(KEY, tmp_path).mkdir()
    with pytest.raises(OSError):
        write(RECORD, tmp_path)
    assert os.listdir(tmp_path) == [path_of(KEY, tmp_path).name]


def test_what_a_record_says_of_its_ranks():
    facts = RECORD.facts()
    assert (facts.topology, facts.native, facts.has_segments) == (Topology(["a", "a"]), (), True)


def test_where_files_are(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(folder(Settings())) == "/home/me/.cache/mpidist/tuning"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(folder(Settings())) == "/cache/mpidist/tuning"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the standard
    assert str(folder(Settings())) == "/home/me/.cache/mpidist/tuning"
    assert folder(Settings(tuning_folder=str(tmp_path))) == tmp_path


# -- when a launch measures -------------------------------------------------------------------------------------------


def reduced(count, algorithm=None, fused=False, library=LIBRARY):
    """Reduce once, and return what was chosen for 1 GiB afterwards; of 1 and 2 the sum is 3."""
    communicator = _communicator(library)
    values = numpy.full(count, communicator.rank + 1.0, "f4")
    if fused:
        (values,) = FusedAllReduce(communicator, algorithm=algorithm)([values])
    else:
        communicator.all_reduce(values, algorithm=algorithm)
    assert (values == communicator.size * (communicator.size + 1) / 2).all()
    return communicator.way(1 << 30, None).algorithm


def _communicator(library=LIBRARY):
    from mpidist import transports

    transports.world().transport.library = library
    return Communicator.world()


@pytest.mark.parametrize("fused", [False, True])
def test_the_first_long_all_reduce_measures_and_keeps_what_was_measured(where, measuring, fused):
    assert run_ranks(2, reduced, LONG, None, fused) == ["ring", "ring"]
    assert sorted(measuring) == [0, 1]
    (record,) = stored(where)
    assert (record.measured_by, record.figures) == ("calibration", RECORD.figures)
    assert run_ranks(2, reduced, LONG, None, fused) == ["ring", "ring"]
    assert len(measuring) == 2  # the second launch found it


def test_what_was_planned_before_is_chosen_anew_when_there_are_measurements(where, measuring):
    def run():
        communicator, chosen = _communicator(), []
        begin = communicator.begin

        def noted(call, timeout_seconds=None):
            chosen.extend(name for name, nbytes in call.description["packs"] if nbytes == 40)
            return begin(call, timeout_seconds)

        communicator.begin = noted
        quick = []
        for count in (10, LONG, 10):
            communicator.all_reduce(numpy.ones(count, "f4"))
            quick.append(
                communicator._calls[(numpy.ndarray, (count,), numpy.dtype("f4"), "sum", None)].call.description[
                    "packs"
                ][0][0]
            )
        return chosen, quick

    assert (
        run_ranks(2, run)
        == [
            (["shared_memory in segments of 512 KiB", "ring"], ["shared_memory in segments of 512 KiB", "ring", "ring"])
        ]
        * 2
    )


@pytest.mark.parametrize("is_update", [False, True])
def test_the_deadline_of_the_call_that_measures_is_that_of_measuring(where, monkeypatch, is_update):
    seen = []

    def calibrate(communicator):
        seen.append(communicator.control.watch("a message").timeout_seconds)
        return RECORD.figures

    monkeypatch.setattr(tuning, "calibrate", calibrate)

    def run():
        communicator, gradient = _communicator(), numpy.ones(1 << 18, "f4")
        before = communicator.control.watch("a message").timeout_seconds
        if is_update:
            FusedUpdate(communicator, timeout_seconds=77.0).plan([gradient], ["v"])
        else:
            communicator.all_reduce(gradient, timeout_seconds=77.0)
        assert communicator.control.watch("a message").timeout_seconds == before

    run_ranks(2, run)
    assert seen == [77.0, 77.0]


def test_a_short_one_does_not(where, measuring):
    assert run_ranks(2, reduced, 10) == ["shared_memory", "shared_memory"]
    assert not measuring and not where.exists()


@pytest.mark.parametrize("algorithm", ["ring", "shared_memory", "pinned"])
def test_an_explicit_choice_does_not(where, measuring, algorithm):
    run_ranks(2, reduced, LONG, algorithm)
    assert not measuring and not where.exists()


@pytest.mark.parametrize(
    ("variable", "value", "chosen"),
    [
        ("CALIBRATE", "0", "shared_memory"),
        ("DETERMINISTIC", "1", "shared_memory"),
        ("ALGORITHM", "recursive_doubling", "recursive_doubling"),
    ],
)
def test_settings_that_keep_it_from_measuring(where, measuring, monkeypatch, variable, value, chosen):
    monkeypatch.setenv(f"MPIDIST_{variable}", value)
    assert run_ranks(2, reduced, LONG) == [chosen, chosen]
    assert not measuring and not where.exists()


def test_one_rank_and_ranks_that_are_threads_do_not(where, measuring):
    assert run_ranks(1, reduced, LONG) == ["none"]
    assert run_ranks(2, reduced, LONG, None, False, "") == ["shared_memory"] * 2
    assert not measuring and not where.exists()


@pytest.mark.parametrize("calibrate", ["0", "1"])
def test_what_is_stored_is_used_whether_it_may_measure_or_not(where, measuring, monkeypatch, calibrate):
    run_ranks(2, reduced, LONG)
    del measuring[:]
    monkeypatch.setenv("MPIDIST_CALIBRATE", calibrate)
    assert run_ranks(2, reduced, LONG) == ["ring", "ring"]
    assert not measuring


def test_a_pinned_choice_does_not_look_at_what_is_stored(where, measuring, monkeypatch):
    run_ranks(2, reduced, LONG)
    monkeypatch.setenv("MPIDIST_DETERMINISTIC", "1")
    assert run_ranks(2, reduced, LONG) == ["shared_memory"] * 2
    assert run_ranks(2, reduced, LONG, "auto") == ["shared_memory"] * 2


def test_a_damaged_file_is_measured_anew_with_a_line(where, measuring, capsys):
    run_ranks(2, reduced, LONG)
    (path,) = where.iterdir()
    path.write_text(path.read_text()[:100])
    assert run_ranks(2, reduced, LONG) == ["ring", "ring"]
    assert len(measuring) == 4 and read(path).figures == RECORD.figures
    said = capsys.readouterr().err
    assert said.count("mpidist:") == 1 and str(path) in said and "measured anew" in said


def test_a_damaged_file_that_may_not_be_measured_anew_is_a_line_with_the_cure(where, measuring, capsys, monkeypatch):
    run_ranks(2, reduced, LONG)
    (path,) = where.iterdir()
    path.write_text("{")
    monkeypatch.setenv("MPIDIST_CALIBRATE", "0")
    assert run_ranks(2, reduced, LONG) == ["shared_memory"] * 2
    assert "mpidist tune measures them anew" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_a_line_and_the_launch_works(where, measuring, capsys):
    where.write_text("a file in the way")
    assert run_ranks(2, reduced, LONG) == ["ring", "ring"]
    said = capsys.readouterr().err
    assert "cannot be kept" in said and "MPIDIST_TUNING_FOLDER" in said


def test_ranks_with_other_tensors_are_named_before_anything_is_measured(where, measuring):
    def ranks():
        communicator = _communicator()
        with pytest.raises(CollectiveMismatchError, match=r"in all_reduce\(sum\), tensor 0: .*\(10,\).*\(65536,\)"):
            communicator.all_reduce(numpy.ones(LONG if communicator.rank == 0 else 10, "f4"))
        return reduced(LONG)  # and the ranks are in step still

    assert run_ranks(2, ranks) == ["ring", "ring"]
    assert sorted(measuring) == [0, 1]


def test_real_figures_of_threads_give_right_sums(where):
    assert set(run_ranks(3, reduced, LONG)) <= {"shared_memory", "recursive_doubling", "ring", "rabenseifner"}
    assert len(stored(where)) == 1
