"""The notes of a rank under ``mpidist run``."""

from __future__ import annotations

import os

import pytest

from mpidist.cluster.join_notes import joining, note_joined
from mpidist.cluster.launchers import Launcher

RANK = Launcher(name="a launcher", size=4, rank=3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_RUN_FOLDER", str(tmp_path))
    (tmp_path / "3.process").write_text(f"{os.getpid()}\n")
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_rank_notes_that_it_waits_and_that_it_has_joined(folder):
    with joining(RANK):
        assert names(folder) == ["3.joining", "3.process"]
        note_joined(RANK)
        assert names(folder) == ["3.joined", "3.joining", "3.process"]
    assert names(folder) == ["3.joined", "3.process"]


def test_a_rank_that_fails_there_waits_no_more(folder):
    with pytest.raises(ValueError, match="lost"), joining(RANK):
        raise ValueError("lost")
    assert names(folder) == ["3.process"]


def test_a_program_that_the_rank_has_started_itself_leaves_notes_for_it(folder):
    (folder / "3.process").write_text(f"{os.getppid()}\n")
    with joining(RANK):
        assert "3.joining" in names(folder)


def test_a_rank_of_another_job_leaves_none(folder):
    (folder / "3.process").write_text("1\n" if os.getppid() != 1 else "2\n")
    with joining(RANK):
        note_joined(RANK)
        assert names(folder) == ["3.process"]


def test_there_is_none_of_a_rank_that_was_not_noted(folder):
    with joining(Launcher(name="a launcher", size=4, rank=2)), joining(None):
        assert names(folder) == ["3.process"]


def test_a_folder_that_is_gone_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("MPIDIST_RUN_FOLDER", str(tmp_path / "gone"))
    with joining(RANK):
        note_joined(RANK)


def test_without_a_folder_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv("MPIDIST_RUN_FOLDER", raising=False)
    monkeypatch.chdir(tmp_path)
    with joining(RANK):
        note_joined(RANK)
    assert names(tmp_path) == []
