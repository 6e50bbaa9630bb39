"""Files that are there whole, or as they were before."""

from __future__ import annotations

import os
import threading

import pytest

from mpidist.whole_file import written


def test_a_file_is_as_it_was_until_the_block_has_ended(tmp_path):
    path = tmp_path / "figures"
    path.write_text("before")
    with written(path) as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after" and os.listdir(tmp_path) == ["figures"]


def test_a_file_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "figures"
    path.write_text("before")
    with pytest.raises(OSError, match="full"), written(path) as file:
        file.write(b"half of")
        raise OSError("full")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["figures"]


def test_a_pipe_stays_one_and_takes_what_is_written(tmp_path):
    path, came = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: came.append(path.read_bytes()), daemon=True)
    reader.start()
    with written(path) as file:
        file.write(b"figures")
    reader.join(20)
    assert came == [b"figures"] and path.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_one(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    (folder / "figures").write_text("before")
    link.symlink_to(folder / "figures")
    with written(link) as file:
        file.write(b"after")
    assert link.is_symlink() and (folder / "figures").read_text() == "after"
    assert sorted(os.listdir(tmp_path)) == ["folder", "link"] and os.listdir(folder) == ["figures"]


def test_a_folder_is_refused_and_kept(tmp_path):
    with pytest.raises(IsADirectoryError), written(tmp_path) as file:
        file.write(b"figures")
    assert tmp_path.is_dir() and os.listdir(tmp_path) == []
