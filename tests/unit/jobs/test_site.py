"""Defaults of a site: which files count, and what is refused in them."""

from __future__ import annotations

import pytest

from mpidist.jobs.options import OPTIONS
from mpidist.jobs.site import read_site, site_files


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_folder_stands_above_the_user_and_a_given_file_stands_alone(tmp_path):
    environ = {"HOME": str(tmp_path / "home")}
    user = write(tmp_path / "home/.config/mpidist/mpidist.toml", '[job]\npartition = "cpu"\ncores = 4\n')
    here = write(tmp_path / "here/mpidist.toml", '[job]\npartition = "gpu"\nsetup = ["module load a", "ulimit -l"]\n')
    files = site_files(environ, tmp_path / "here")
    assert files == [user, here]
    found = read_site(files, "job", OPTIONS)
    assert {name: default.values for name, default in found.items()} == {
        "partition": ("gpu",),
        "cores": ("4",),
        "setup": ("module load a", "ulimit -l"),
    }
    assert [found[name].file for name in ("partition", "cores", "setup")] == [here, user, here]
    assert site_files(environ, tmp_path / "here", "other.toml") == [type(user)("other.toml")]
    assert site_files({"HOME": "/nowhere"}, tmp_path) == []


def test_the_configuration_folder_is_the_one_that_the_environment_names(tmp_path):
    path = write(tmp_path / "config/mpidist/mpidist.toml", "")
    assert site_files({"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": "/nowhere"}, tmp_path) == [path]
    assert read_site([path], "job", OPTIONS) == {}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[job]\nparttion = 'gpu'", "[job] has no option 'parttion'; did you mean partition?"),
        ("[job]\nzzz = 1", "[job] has no option 'zzz'; expected one of account, "),
        ("[job]\nnodes = true", "nodes = True; expected a text, a number, or a list of texts"),
        ("job = 3", "expected a table that begins with the line [job]"),
        ("[job\n", "is no TOML"),
    ],
)
def test_a_site_file_that_is_wrong_is_refused_by_its_name(tmp_path, text, message):
    path = write(tmp_path / "mpidist.toml", text)
    with pytest.raises(ValueError) as refused:
        read_site([path], "job", OPTIONS)
    assert str(path) in str(refused.value) and message in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory; expected a file such as mpidist.toml"):
        read_site([tmp_path / "none.toml"], "job", OPTIONS)
