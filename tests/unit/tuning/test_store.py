"""The store of figures, and when a launch looks into it."""

from __future__ import annotations

import json
import os
import platform

import numpy
import pytest

from mpidist import transports
from mpidist.cluster.topology import Topology
from mpidist.collectives.engine import Engine
from mpidist.collectives.reductions.update import FusedUpdate
from mpidist.errors import CollectiveMismatchError, RankFailedError
from mpidist.options import Settings
from mpidist.schedules.cost import CostModel
from mpidist.schedules.figures import Figures
from mpidist.testing import run_ranks
from mpidist.tuning import store
from mpidist.tuning.store import Record, folder, key_of, load_choices, look_up, path_of, processor, read, stored, write
from mpidist.world import world_communicator

LIBRARY = "Some MPI 1.2.3"
KEY = {
    "hosts": ["a"],
    "ranks": "1 node x 2 ranks",
    "processor": "Some CPU",
    "mpi": LIBRARY,
    "shared_memory": True,
    "algorithms": ["shared_memory", "recursive_doubling", "ring"],
}

LONG = 1 << 16


def figures(**seconds):
    return Figures(CostModel.flat(1e-6, 1e-9), {name: ((4.0, taken),) for name, taken in seconds.items()})


RECORD = Record(KEY, ("a", "a"), figures(shared_memory=9e-3, recursive_doubling=5e-3, ring=1e-3))


@pytest.fixture
def where(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_TUNING_FOLDER", str(tmp_path / "tuning"))
    return tmp_path / "tuning"


# -- the store --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path):
    path = write(RECORD, tmp_path / "new" / "folder")
    assert path == path_of(KEY, tmp_path / "new" / "folder")
    assert read(path) == RECORD
    assert look_up(KEY, path.parent) == (RECORD, "")
    assert stored(path.parent) == ([RECORD], [])
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    "change",
    [
        {"hosts": ["b"]},
        {"ranks": "1 node x 3 ranks"},
        {"mpi": "Some MPI 1.2.4"},
        {"processor": "Another"},
        {"shared_memory": False},
    ],
)
def test_other_ranks_have_a_file_of_their_own(tmp_path, change):
    write(RECORD, tmp_path)
    assert look_up({**KEY, **change}, tmp_path) == (None, "")


def test_nothing_is_stored_in_a_folder_that_is_not_there(tmp_path):
    assert look_up(KEY, tmp_path / "none") == (None, "")
    assert stored(tmp_path / "none") == ([], [])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", '{"format": 0}', '{"format": 1}', '{"format": 2}', "\x00\xff"]
)
def test_a_damaged_file_is_said_so(tmp_path, text):
    path = path_of(KEY, tmp_path)
    path.write_bytes(text.encode("latin-1"))
    record, problem = look_up(KEY, tmp_path)
    assert record is None
    assert str(path) in problem and "cannot be used" in problem
    assert stored(tmp_path) == ([], [problem])


@pytest.mark.parametrize("name", ["key", "hosts", "figures"])
@pytest.mark.parametrize("value", [None, 3, [], {}, "x"])
def test_a_file_with_something_else_in_a_place_is_no_crash(tmp_path, name, value):
    path = write(RECORD, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    record, problem = look_up(KEY, tmp_path)
    assert (record is None) == bool(problem)
    if record is not None:
        assert record.key == KEY and record.facts().topology.size >= 1


def test_stored_figures_of_no_machine_are_refused_with_the_reason(tmp_path):
    slow = Figures(CostModel.flat(1e-6, 1 / 372e3), RECORD.figures.points)
    write(Record(KEY, RECORD.hosts, slow), tmp_path)
    record, problem = look_up(KEY, tmp_path)
    assert record is None
    assert "that is 3.72e+05 bytes a second, and a real one has 5e+07 to 2e+12" in problem
    assert stored(tmp_path) == ([], [problem])


def test_a_file_of_other_ranks_under_this_name_is_not_used(tmp_path):
    path_of(KEY, tmp_path).write_text(write(Record({**KEY, "hosts": ["b"]}, *_rest()), tmp_path).read_text())
    record, problem = look_up(KEY, tmp_path)
    assert record is None and "are of other ranks" in problem


def _rest():
    return RECORD.hosts, RECORD.figures


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


# -- when a launch looks into it --------------------------------------------------------------------------------------


def _communicator(library=LIBRARY):
    """Return this rank's communicator; threads whose transport names no library have nothing stored."""
    transports.world().transport.library = library
    return world_communicator()


def _store():
    communicator = _communicator()
    record = Record(key_of(communicator), communicator.topology.hosts, RECORD.figures)
    return write(record, folder(communicator.control.settings)) if communicator.rank == 0 else None


@pytest.fixture
def path(where):
    """Store figures of two ranks by which the ring is the quickest; return their file."""
    return run_ranks(2, _store)[0]


@pytest.fixture
def loads(monkeypatch):
    """Return the list of the ranks that asked for what is stored."""
    asked = []

    def load(communicator, watch):
        asked.append(communicator.rank)
        return load_choices(communicator, watch)

    monkeypatch.setattr(store, "load_choices", load)
    return asked


def reduced(count, algorithm=None, fused=False, library=LIBRARY):
    """Reduce once, and return what was chosen for 1 GiB afterwards; of 1 and 2 the sum is 3."""
    communicator = _communicator(library)
    values = numpy.full(count, communicator.rank + 1.0, "f4")
    if fused:
        (values,) = Engine(communicator, algorithm=algorithm)([values])
    else:
        communicator.all_reduce(values, algorithm=algorithm)
    assert (values == communicator.size * (communicator.size + 1) / 2).all()
    return communicator.way(1 << 30, None).algorithm


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("count", [10, LONG])
def test_the_first_all_reduce_loads_what_is_stored_once(path, loads, fused, count):
    def ranks():
        return reduced(count, None, fused), reduced(LONG, None, fused), reduced(1, None, fused)

    assert run_ranks(2, ranks) == [("ring",) * 3] * 2
    assert sorted(loads) == [0, 1]


def test_the_first_short_array_loads_it_too(path, loads):
    def ranks():
        communicator = _communicator()
        (total,) = Engine(communicator)([numpy.ones(3, "f4")])
        return total.tolist(), communicator.way(1 << 30, None).algorithm

    assert run_ranks(2, ranks) == [([2.0] * 3, "ring")] * 2
    assert sorted(loads) == [0, 1]


def test_an_error_of_rank_0_while_it_looks_reaches_all_ranks(path, monkeypatch):
    def look_up(*args):
        raise KeyError("odd")

    monkeypatch.setattr(store, "look_up", look_up)

    def ranks():
        with pytest.raises((KeyError, RankFailedError), match="odd"):
            reduced(10)

    run_ranks(2, ranks)


def test_nothing_is_measured_or_written_where_nothing_is_stored(where, loads):
    assert run_ranks(2, reduced, LONG) == ["shared_memory"] * 2
    assert sorted(loads) == [0, 1] and not where.exists()


def test_what_was_planned_before_is_chosen_anew_by_what_is_loaded(path):
    def ranks():
        communicator, values = _communicator(), numpy.ones(10, "f4")
        communicator.all_reduce(values, algorithm="ring")
        before, call = communicator.facts().choices, communicator.control.call
        communicator.all_reduce(values)
        return before, communicator.facts().choices is not None, communicator.control.call - call

    assert run_ranks(2, ranks) == [(None, True, 2)] * 2  # a check, with the choices, and the all-reduce


@pytest.mark.parametrize("is_update", [False, True])
def test_the_deadline_of_the_call_that_loads_is_that_of_loading(path, monkeypatch, is_update):
    seen = []

    def load(communicator, watch):
        seen.append(watch.timeout_seconds)

    monkeypatch.setattr(store, "load_choices", load)

    def ranks():
        communicator, gradient = _communicator(), numpy.ones(1 << 18, "f4")
        before = communicator.control.watch("a message").timeout_seconds
        if is_update:
            FusedUpdate(communicator, timeout_seconds=77.0).plan([gradient], ["v"])
        else:
            communicator.all_reduce(gradient, timeout_seconds=77.0)
        assert communicator.control.watch("a message").timeout_seconds == before

    run_ranks(2, ranks)
    assert seen == [77.0, 77.0]


@pytest.mark.parametrize("algorithm", ["ring", "shared_memory", "pinned"])
def test_an_explicit_choice_does_not_load(path, loads, algorithm):
    run_ranks(2, reduced, LONG, algorithm)
    assert not loads


@pytest.mark.parametrize(
    ("variable", "value", "chosen"),
    [("DETERMINISTIC", "1", "shared_memory"), ("ALGORITHM", "recursive_doubling", "recursive_doubling")],
)
def test_settings_that_keep_it_from_loading(path, loads, monkeypatch, variable, value, chosen):
    monkeypatch.setenv(f"MPIDIST_{variable}", value)
    assert run_ranks(2, reduced, LONG) == [chosen, chosen]
    assert not loads


def test_a_pinned_choice_does_not_load_though_auto_is_asked_for(path, loads, monkeypatch):
    monkeypatch.setenv("MPIDIST_DETERMINISTIC", "1")
    assert run_ranks(2, reduced, LONG, "auto") == ["shared_memory"] * 2
    assert not loads


def test_one_rank_and_ranks_that_are_threads_do_not_load(path, loads):
    assert run_ranks(1, reduced, LONG) == ["none"]
    assert run_ranks(2, reduced, LONG, None, False, "") == ["shared_memory"] * 2
    assert not loads


def test_a_damaged_file_is_a_line_with_the_cure_and_the_fixed_table_serves(path, capsys):
    path.write_text(path.read_text()[:100])
    assert run_ranks(2, reduced, LONG) == ["shared_memory"] * 2
    said = capsys.readouterr().err
    assert said.count("mpidist:") == 1 and str(path) in said and "mpidist tune measures anew" in said


def test_ranks_with_other_tensors_are_named_before_anything_is_loaded(path, loads):
    def ranks():
        communicator = _communicator()
        with pytest.raises(CollectiveMismatchError, match=r"in all_reduce\(sum\), tensor 0: .*\(10,\).*\(65536,\)"):
            communicator.all_reduce(numpy.ones(LONG if communicator.rank == 0 else 10, "f4"))
        assert not loads
        communicator.barrier()
        return reduced(LONG)  # and the ranks are in step still

    assert run_ranks(2, ranks) == ["ring", "ring"]
    assert sorted(loads) == [0, 1]


# -- the processor ----------------------------------------------------------------------------------------------------


def test_the_processor_is_named_with_its_caches(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : Some CPU @ 3 GHz\nprocessor : 1\nmodel name : x\n")
    for index, (level, kind, size) in enumerate([(1, "Data", "32K"), (1, "Instruction", "64K"), (3, "Unified", "32M")]):
        cache = tmp_path / f"cpu0/cache/index{index}"
        cache.mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (cache / name).write_text(f"{value}\n")
    (tmp_path / "cpu0/cache/index3").mkdir()  # and one that says nothing
    found = processor(tmp_path / "cpuinfo", tmp_path)
    assert found == f"Some CPU @ 3 GHz, {os.cpu_count()} cores, L1 32K, L3 32M"


def test_a_system_that_tells_nothing_is_named_by_its_machine(tmp_path):
    assert processor(tmp_path / "none", tmp_path) == f"{platform.machine()}, {os.cpu_count()} cores"
