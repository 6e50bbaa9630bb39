"""The environment variables: what is read, what is refused, and what is unknown."""

from __future__ import annotations

import warnings

import pytest

from mpidist import options
from mpidist.options import Settings, settings


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(options, "_warned", set())


def test_known_variables_are_read_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = settings(
            {"MPIDIST_TIMEOUT_SECONDS": "2.5", "MPIDIST_NO_MPI": "1", "MPIDIST_VIRTUAL_NODES": "2", "MPI_OTHER": "x"}
        )
        assert settings({options.RUN_TOKEN: "t", options.RUN_FOLDER: "/f"}).run_folder == "/f"
    assert chosen == Settings(timeout_seconds=2.5, no_mpi=True, virtual_nodes=2)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("TIMEOUT_SECONDS", "5m", r"='5m': expected a number of seconds, 0 \(never\) or more"),
        ("WARN_SECONDS", "-1", r"=-1: expected a number of seconds, 0 \(never\) or more"),
        ("TIMEOUT_SECONDS", "inf", r"=inf: expected a number of seconds"),
        ("VIRTUAL_NODES", "two", "='two': expected a whole number, 1 or more"),
        ("VIRTUAL_NODES", "0", "=0: expected a whole number, 1 or more"),
        ("SHARED_MEMORY", "yes", "='yes': expected 0 or 1"),
    ],
)
def test_what_cannot_be_read(name, text, expected):
    with pytest.raises(ValueError, match=f"environment variable MPIDIST_{name}{expected}"):
        settings({f"MPIDIST_{name}": text})


def test_a_typo_is_warned_of_once_with_the_names_that_are_like_it():
    environ = {"MPIDIST_TIMEOUT": "5"}
    with pytest.warns(RuntimeWarning, match="MPIDIST_TIMEOUT is unknown .*MPIDIST_TIMEOUT_SECONDS") as seen:
        assert settings(environ) == settings(environ) == Settings()
    assert len(seen) == 1 and "ALGORITHM" not in str(seen[0].message)


def test_a_name_like_no_other_is_warned_of_with_all_names():
    with pytest.warns(RuntimeWarning, match="MPIDIST_ALGORITHM.*MPIDIST_NO_MPI"):
        settings({"MPIDIST_XYZZY": "1"})


def test_ranks_of_mpidist_run_leave_the_warning_to_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings({"MPIDIST_TIMEOUT": "5", options.RUN_TOKEN: "t"})
