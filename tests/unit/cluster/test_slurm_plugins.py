"""What srun needs for an MPI; what ``srun --mpi=list`` prints is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidist.cluster.slurm_plugins import listed_plugins, offered_plugins, srun_cure

#: Of Slurm 22.05, on standard output; of an older one, on standard error.
LIST = """MPI plugin types are...
\tpmix
\tnone
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v4
"""
OLD_LIST = "srun: MPI types are...\nsrun: pmi2\nsrun: none\n"


def srun_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, prints: str) -> None:
    """Put an srun on PATH that prints a list."""
    (folder / "list").write_text(prints)
    script = f'[ "$*" = --mpi=list ] && while read -r line; do echo "$line"; done <{folder}/list'
    (folder / "srun").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_plugins_are_the_lines_of_one_word_and_versions() -> None:
    assert listed_plugins(LIST) == ("pmix", "none", "cray_shasta", "pmi2", "pmix_v4")
    assert listed_plugins("specific pmix plugin versions available: pmix_v4,pmix_v5\n") == ("pmix_v4", "pmix_v5")
    assert listed_plugins(OLD_LIST) == ("pmi2", "none")
    assert listed_plugins("srun: error: no such option, none\n") == ()


@pytest.mark.parametrize(
    "mpi, used, prints, expected",
    [
        (
            "Open MPI 5.0.11",
            "pmi2",
            LIST,
            "Start with `srun --mpi=pmix` (`srun --mpi=list` here: cray_shasta, none, pmi2, pmix, pmix_v4)",
        ),
        ("MPICH 5.0.2", "", OLD_LIST, "Start with `srun --mpi=pmi2` (`srun --mpi=list` here: none, pmi2)"),
        (
            "Open MPI 5.0.11",
            "pmi2",
            OLD_LIST,
            "It takes `srun --mpi=pmix`, which this Slurm does not have (`srun --mpi=list` here: none, pmi2)",
        ),
        (
            "MPICH 5.0.2",
            "pmi2",
            OLD_LIST,
            "Start with another plugin of srun (`srun --mpi=list` here: none, pmi2)",
        ),
        ("MPItrampoline 5", "", "", "Start with another plugin of srun (`srun --mpi=list` shows them)"),
        ("MPICH 5.0.2", "", "", "Start with `srun --mpi=pmi2`"),
    ],
)
def test_the_cure_quotes_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mpi: str, used: str, prints: str, expected: str
) -> None:
    srun_on_path(tmp_path, monkeypatch, prints)
    assert srun_cure(mpi, used) == expected


def test_no_srun_offers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert offered_plugins() == ()
    (tmp_path / "srun").write_text("no program")
    (tmp_path / "srun").chmod(0o755)
    assert offered_plugins() == ()
