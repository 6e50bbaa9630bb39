"""The table [run] of a site file: what it gives to ``mpidist run``, what stands above it, and what is refused."""

from __future__ import annotations

import pytest

from mpidist.commands import run
from mpidist.commands.launch.mpirun import Mpirun
from mpidist.commands.launch.probe import MpiFound


@pytest.fixture
def site(tmp_path, monkeypatch, capsys):
    """Write the site file of the folder, and of the user; return (status, output, errors) of a command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(run, "probe_mpi", lambda: MpiFound("4", "Open MPI", "Open MPI", (5,)))
    monkeypatch.setattr(run, "find_mpirun", lambda mpi: Mpirun("mpirun", "Open MPI", (5,)))
    (tmp_path / "train.py").touch()

    def ran(words, here="", user=""):
        (tmp_path / "mpidist.toml").write_text(here)
        (tmp_path / "config" / "mpidist").mkdir(parents=True, exist_ok=True)
        (tmp_path / "config" / "mpidist" / "mpidist.toml").write_text(user)
        try:
            status = run.main([*words, "--dry-run", "train.py"] if "--show-site" not in words else words)
        except SystemExit as left:
            status = left.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return ran


def test_every_option_but_those_of_one_launch_may_be_in_a_file():
    assert set(run.site_options(run.parser())) == {
        "ranks", "hosts", "hostfile", "x", "tag", "log-dir", "timeout", "fault-tolerant", "launcher-args", "quiet"
    }  # fmt: skip


def test_a_file_fills_in_what_the_command_line_leaves_out(site):
    text = '[run]\nranks = 3\nlauncher_args = "--map-by core"\nx = ["A=1", "B=2"]\ntimeout = 1.5\ntag = true\n'
    status, line, said = site([], text)
    assert status == 0
    assert line.startswith("env ") and " A=1 B=2 " in line and "-n 3 " in line and "--map-by core" in line
    assert "defaults of " in said and "mpidist.toml: ranks, launcher-args, x, timeout, tag" in said
    assert "defaults" not in site([], text + "quiet = true\n")[2]


def test_the_command_line_stands_above_the_folder_and_the_folder_above_the_user(site):
    files = {"here": '[run]\nranks = 3\nx = ["A=2"]', "user": '[run]\nranks = 4\nx = ["A=1"]\nlauncher-args = "--u"'}
    assert "-n 3 " in site([], **files)[1] and " --u " in site([], **files)[1]
    status, line, _ = site(["-n", "2", "-x", "B=5"], **files)
    assert "-n 2 " in line and " A=2 B=5 " in line  # variables come on top
    assert " A=7 " in site(["-x", "A=7"], **files)[1]
    status, _, said = site(["--site", "/dev/null"], **files)
    assert status == 2 and "-n RANKS is needed" in said


def test_of_options_that_exclude_each_other_the_stronger_one_counts(site):
    log, tag = 'log-dir = "logs"', "tag = true"
    assert "log-dir" not in site(["--tag", "-n", "2"], f"[run]\n{log}")[2]
    assert "tag" not in site(["-n", "2"], f"[run]\n{log}", f"[run]\n{tag}")[2].partition("defaults of")[2]
    assert "log-dir" in site(["-n", "2"], f"[run]\n{log}\ntag = false")[2]
    status, _, said = site(["-n", "2"], f"[run]\n{log}\n{tag}")
    assert status == 2 and "mpidist.toml: [run] has log-dir and tag; expected one of them" in said


@pytest.mark.parametrize(
    "text, message",
    [
        ("[run]\nlog_dri = 'x'", "[run] has no option 'log_dri'; did you mean log-dir?"),
        ("[run]\ndry-run = true", "[run] has no option 'dry-run'; expected one of fault-tolerant, "),
        ("[run]\ntag = 'yes'", "tag = 'yes'; expected true or false"),
        ("[run]\nranks = true", "ranks = True; expected a text, a number, or a list of texts"),
        ("[run]\nranks = 0", "ranks: '0': expected a whole number, 1 or more"),
        ("[run]\nranks = 2.5", "ranks: '2.5': expected a whole number, 1 or more"),
        ("[run]\ntimeout = 'soon'", "timeout: 'soon': expected a time such as "),
        ("[run]\nhosts = ['a', 'b']", "hosts: expected one value, got 2"),
        ("[rnu]\nranks = 2", "has no table 'rnu'; did you mean run?"),
        ("run = 2", "'run' is 2; expected a table that begins with the line [run]"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_its_name(site, text, message):
    status, _, said = site([], text)
    assert status == 2 and "mpidist.toml" in said and message in said


def test_show_site_says_what_comes_from_where(site):
    status, page, _ = site(["--show-site"], "[run]\ntag = true", "[run]\ntimeout = 60\n[job]\nnodes = 2")
    assert status == 0
    assert [line.split()[:2] for line in page.splitlines()] == [["option", "value"], ["timeout", "60"], ["tag", "true"]]
    assert page.splitlines()[1].endswith("config/mpidist/mpidist.toml")
    assert "no defaults: there is no mpidist.toml with a table [run] here" in site(["--show-site"])[1]
