"""Names in checkpoints: whatever is saved is found again, and what no file can hold is refused when it is made."""

from __future__ import annotations

import json

import h5py
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import optimizers
from mpidist.errors import CheckpointError
from mpidist.testing import run_ranks
from mpidist.training import hdf5_file
from mpidist.training.checkpoint import Checkpoint
from mpidist.training.checkpoint_manager import CheckpointManager
from mpidist.training.entry_names import MOST_BYTES, coded, coded_attribute, decoded
from mpidist.variables import Variable

ODD = ["a//b", "/a", "a/", "/", "//", "", ".", "..", "a/./b", "../a", "a\0b", "\0", "%", "a%b", "%2E", "%.", "%25",
       "a\nb", "ä/ß", "dtype", "crc32", "name", "mpidist_format", "x" * 5000, "a/" * 1200 + "b"]  # fmt: skip

#: Text with many of the characters that mean something in a file.
TEXTS = st.text(st.sampled_from("/.%a2E5\0\n") | st.characters(exclude_categories=["Cs"]), max_size=12)


class Part:
    """An object with a state of the given keys."""

    def __init__(self, state):
        self.own = dict(state)

    def state(self):
        return self.own

    def restore(self, state):
        self.own = dict(state)


def _restored(tmp_path, saved, into):
    """Save one checkpoint and restore it into another one, on this rank."""
    Checkpoint(**saved).save(tmp_path / "all.h5")
    Checkpoint(**into).restore(tmp_path / "all.h5")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ODD, ids=range(len(ODD)))
def test_a_variable_of_any_name(tmp_path, ranks, name):
    def on_rank():
        saved, found = Variable(numpy.arange(3.0)), Variable(numpy.zeros(3))
        other, other_found = Variable(5.0), Variable(0.0)
        _restored(tmp_path, {"model": {name: saved, "b": other}}, {"model": {name: found, "b": other_found}})
        return found.value.tolist(), float(other_found.value)

    assert run_ranks(ranks, on_rank) == [([0.0, 1.0, 2.0], 5.0)] * ranks


@pytest.mark.parametrize("name", ODD, ids=range(len(ODD)))
def test_a_part_of_any_name_at_the_top(tmp_path, name):
    found = Variable(0.0)
    _restored(tmp_path, {name: Variable(3.0)}, {name: found})
    assert float(found.value) == 3.0


@pytest.mark.parametrize("key", ODD, ids=range(len(ODD)))
def test_a_state_with_any_key(tmp_path, key):
    found = Part({})
    _restored(tmp_path, {"part": Part({key: 7, f"{key}!": numpy.arange(2)})}, {"part": found})
    assert found.own[key] == 7 and found.own[f"{key}!"].tolist() == [0, 1]


def test_numbers_beside_an_array_that_have_the_names_of_its_marks(tmp_path):
    state = {"w": numpy.arange(3), "w/crc32": 1, "w/dtype": "mine", "w/%.dtype": 2}
    found = Part({})
    _restored(tmp_path, {"part": Part(state)}, {"part": found})
    assert found.own.pop("w").tolist() == [0, 1, 2]
    assert found.own == {"w/crc32": 1, "w/dtype": "mine", "w/%.dtype": 2}


def test_an_object_whose_state_is_empty(tmp_path):
    found = Part({"old": 1})
    _restored(tmp_path, {"part": Part({})}, {"part": found})
    assert found.own == {}


@pytest.mark.parametrize("name", ["a//b", "..", "a\0b", "a\nb", ""])
def test_slots_of_optimizers_and_names_of_variables(tmp_path, name):
    def trained():
        variable, optimizer = Variable(numpy.ones(2), name=name or None), optimizers.SGD(0.5, momentum=0.5)
        return variable, optimizer, Checkpoint(**{name: {"v": variable}, "optimizer": {name: optimizer}})

    variable, optimizer, checkpoint = trained()
    optimizer.apply_gradients([(numpy.ones(2), variable)])
    checkpoint.save(tmp_path / "all.h5")
    other, other_optimizer, into = trained()
    into.restore(tmp_path / "all.h5")
    for each, its_optimizer in ((variable, optimizer), (other, other_optimizer)):
        its_optimizer.apply_gradients([(numpy.ones(2), each)])
        # 1 - 0.5; then the velocity is 0.5 * 0.5 + 0.5
        assert each.value.tolist() == [-0.25, -0.25]


def test_other_names_stand_in_the_file_as_they_are(tmp_path):
    Checkpoint(model={"a": {"kernel:0": Variable(1.0)}}).save(tmp_path / "all.h5")
    with h5py.File(tmp_path / "all.h5") as file:
        assert list(file["model/a"]) == ["kernel:0"]


@pytest.mark.parametrize("name", ["a%b", "a%25b", "%", "50%.x", "b/%2E", "plain"])
def test_names_stand_as_they_were_given_in_files_from_before_they_were_coded(tmp_path, monkeypatch, name):
    path, dumps = tmp_path / "old.h5", json.dumps
    with monkeypatch.context() as patch:  # the trailer had no word of names then
        patch.setattr(hdf5_file, "coded", str)
        patch.setattr(hdf5_file.json, "dumps", lambda value: dumps({**value, "names": None}))
        hdf5_file.write(path, {f"m/{name}": numpy.arange(3.0)}, {f"m/{name}/step": 7})
    arrays, numbers = hdf5_file.read(path)
    assert {key: array.tolist() for key, array in arrays.items()} == {f"m/{name}": [0.0, 1.0, 2.0]}
    assert numbers == {f"m/{name}/step": 7}


@given(names=st.sets(TEXTS, min_size=2))
def test_codes_are_read_back_and_tell_names_apart(names):
    codes = [coded(name) for name in names]
    assert [decoded(code) for code in codes] == list(names)
    assert len(set(codes)) == len(names)
    for code in codes:
        assert "\0" not in code and not {"", ".", ".."} & set(code.split("/"))
        assert decoded(coded_attribute("dtype", ["dtype"])) == "dtype" and coded_attribute("dtype", ["dtype"]) != code


@settings(max_examples=25, deadline=None)
@given(names=st.sets(TEXTS.filter(lambda name: "/" not in name), min_size=1, max_size=4))
def test_any_names_side_by_side(tmp_path_factory, names):
    found = {name: Variable(0.0) for name in names}
    saved = {name: Variable(float(index)) for index, name in enumerate(names)}
    _restored(tmp_path_factory.mktemp("names"), {"model": saved}, {"model": found})
    assert [float(variable.value) for variable in found.values()] == [float(index) for index in range(len(names))]


@pytest.mark.parametrize("name, message", [("x" * (MOST_BYTES + 1), "bytes in a checkpoint"), ("\ud800", "no text")])
def test_what_no_file_can_hold_is_refused_when_the_checkpoint_is_made(tmp_path, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        Checkpoint(**{name: Variable(1.0)})
    assert len(str(caught.value)) < 1000
    with pytest.raises(ValueError, match=message):
        Checkpoint().include(name, Variable(1.0))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(part=Part({name: 1})).save(tmp_path / "all.h5")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ranks", [1, 2])
def test_long_lists_in_errors_are_cut_with_a_count(tmp_path, ranks):
    def on_rank():
        Checkpoint(one=Variable(1.0)).save(tmp_path / "all-1.h5")
        many = Checkpoint(model=[Variable(1.0, name=f"v{number}" * 100) for number in range(3000)])
        with pytest.raises(CheckpointError, match="'model/0'.* and 2992 more") as caught:
            many.restore(tmp_path / "all-1.h5")
        assert len(str(caught.value)) < 2000

    run_ranks(ranks, on_rank)


def test_as_many_reasons_as_checkpoints_are_cut_too(tmp_path):
    manager = CheckpointManager(Checkpoint(one=Variable(1.0)), tmp_path, max_to_keep=12)
    for number in range(12):
        manager.save().write_bytes(bytes(number))
    with pytest.raises(CheckpointError, match="and 4 more"):
        manager.restore_or_initialize()
