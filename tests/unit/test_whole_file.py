"""Files that are there whole, or as they were before."""

from __future__ import annotations

import os

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
