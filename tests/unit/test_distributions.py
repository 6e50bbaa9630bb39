"""The sdist holds a whole checkout, the wheel the package alone; both say who made them, for which Pythons."""

from __future__ import annotations

import configparser
import email.message
import email.parser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mpidist
from tests.helpers.distributions import build_sdist, build_wheel, files_of_the_checkout, names_in
from tests.helpers.pages import ROOT

#: What only a host of repositories reads.
OF_THE_HOST = (".git", ".github/")
#: What setuptools adds to an sdist.
ADDED = ("PKG-INFO", "mpidist.egg-info/")

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git knows the files of a checkout")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(sdist, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def test_the_sdist_holds_the_checkout(sdist: Path) -> None:
    expected = {path for path in files_of_the_checkout() if not path.startswith(OF_THE_HOST)}
    assert {"tests/unit/test_distributions.py", "docs/index.md", "examples/train.py", "LICENSE"} <= expected
    assert {name for name in names_in(sdist) if not name.startswith(ADDED)} == expected


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    expected = {path for path in files_of_the_checkout() if path.startswith("mpidist/")}
    assert {"mpidist/py.typed", "mpidist/__init__.pyi", "mpidist/jobs/templates/slurm.sh"} <= expected
    assert {name for name in names_in(wheel) if ".dist-info/" not in name} == expected
    about = {name.partition(".dist-info/")[2] for name in names_in(wheel)} - {""}
    assert {name.rpartition("/")[2] for name in about} == {
        "METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "LICENSE"
    }  # fmt: skip


def test_the_wheel_runs_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "train.py").touch()

    def output(*arguments: str) -> str:
        """Run Python in the folder of the wheel's files, which come first on its path."""
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout

    assert output("-c", "import mpidist; print(mpidist.__file__)").strip() == str(tmp_path / "mpidist" / "__init__.py")
    assert output("-m", "mpidist", "--version").strip() == mpidist.__version__
    assert "srun --mpi=pmix" in output("-m", "mpidist", "job", "slurm", "--mpi", "pmix", "train.py")


def test_the_metadata_say_who_and_for_what(metadata: email.message.Message) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert metadata["Name"] == "mpidist"
    assert metadata["Version"] == mpidist.__version__
    assert metadata["Author"] == "The mpidist authors"
    assert metadata["Requires-Python"] == ">=3.10"
    pythons = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier", []) if ":: Python :: 3." in line]
    assert pythons == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(needed) == sorted(setup["options"]["install_requires"].split())
    assert metadata.get_all("Provides-Extra", []) == list(setup["options.extras_require"])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# mpidist\n")
