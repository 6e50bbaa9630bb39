"""The sdist and the wheel of this checkout, built by setuptools as a release builds them, in a folder of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.helpers.pages import ROOT

_BUILD = "from setuptools import build_meta; build_meta.build_{kind}({folder!r})"


def files_of_the_checkout() -> list[str]:
    """Return the paths of the files that git knows, or would add; no others are built."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    paths = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [path for path in paths if path and (ROOT / path).is_file()]


def build(kind: str, source: Path) -> Path:
    """Build in a process, since setuptools works in the current folder; return the file."""
    out = source.parent / kind
    command = [sys.executable, "-c", _BUILD.format(kind=kind, folder=str(out))]
    out.mkdir()
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    return path


def build_sdist(folder: Path) -> Path:
    """Build the sdist from a copy of the checkout, in which nothing lies that git does not know."""
    source = folder / "checkout"
    for path in files_of_the_checkout():
        copy = source / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy)
    return build("sdist", source)


def build_wheel(sdist: Path, folder: Path) -> Path:
    """Build the wheel from the sdist, as pip does."""
    with tarfile.open(sdist) as archive:
        # of our own making; the argument came with Python 3.10.12
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"))


def names_in(distribution: Path) -> set[str]:
    """Return the files of an sdist, without its folder, or of a wheel."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as archive:
            return {name for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(distribution) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}
