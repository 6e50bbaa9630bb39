"""One of the two checkouts: its Python, its mpidist, and launches of the cases of this checkout with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from benchmarks.pairs.cases import CASES
from benchmarks.suite.ps_work import ADAM, LARGE, MANY, MODEL, MOMENTUM, ONE
from benchmarks.suite.results import Launch
from benchmarks.suite.rows import row_of
from mpidist.commands.launch.probe import without_launcher
from mpidist.errors import LaunchError

#: The folder in which this package is.
_BENCHMARKS = Path(__file__).resolve().parents[1]

#: Works of the parameter servers, and turns of each in a launch.
_WORKS, _TURNS = (ONE, MOMENTUM, ADAM, LARGE, MANY, MODEL), 3

#: Ranks of the launch that looks at the cache mode behind a job of parameter servers.
_LOOKING_RANKS = 2

#: Seconds after which a launch is ended.
_LIMIT_SECONDS = 900


class Side:
    """A checkout, with `mpidist` of its own and `benchmarks` of this one side by side in a folder of links.

    Parameters
    ----------
    name : str
    checkout : Path
        Holds ``mpidist``, and ``.venv`` if it has an environment of its own.
    folder : Path
        Empty; for the links.

    Raises
    ------
    LaunchError
        There is no mpidist, or another one than the checkout's is imported.
    """

    def __init__(self, name: str, checkout: Path, folder: Path) -> None:
        self.name, self.checkout, self._folder = name, checkout.resolve(), folder
        own = self.checkout / ".venv" / "bin" / "python"
        self._python = str(own) if own.exists() else sys.executable
        if not (self.checkout / "mpidist" / "__init__.py").exists():
            raise LaunchError(f"{name}: {checkout} has no folder mpidist")
        (folder / "mpidist").symlink_to(self.checkout / "mpidist")
        (folder / "benchmarks").symlink_to(_BENCHMARKS)
        self._environ = {**without_launcher(os.environ), "PYTHONPATH": str(folder)}
        self._check()

    def _check(self) -> None:
        line = "import os, mpidist; print(os.path.realpath(mpidist.__file__))"
        ended = self._run(["-c", line], {})
        expected = str(self.checkout / "mpidist" / "__init__.py")
        if ended.stdout.strip() != expected:
            told = ended.stdout.strip() or ended.stderr.strip()
            raise LaunchError(f"{self.name}: expected {expected} to be imported, got {told}")

    def _run(self, arguments: Sequence[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        line, own = [self._python, *arguments], {**self._environ, **environ}
        return subprocess.run(line, cwd=self._folder, env=own, capture_output=True, text=True, timeout=_LIMIT_SECONDS)

    @property
    def commit(self) -> str:
        """The checkout's commit, with a plus sign if files differ from it; empty outside git."""
        line = ["git", "-C", str(self.checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(line, capture_output=True, text=True).stdout.strip()

    def launch(self, case: str, ranks: int, seconds: float) -> Launch:
        """Start one launch of a case, and return its rows.

        Raises
        ------
        LaunchError
            It ended without a result.
        """
        environ = dict(CASES[case].environ)
        if CASES[case].measure is not None:
            (launch,) = self._results(["benchmarks.pairs.worker", "--case", case], ranks, seconds, environ)
            return Launch.from_json(launch)
        words = ["benchmarks.suite.ps_job", "--works", *_WORKS, "--turns", str(_TURNS)]
        found = self._saved(words, ranks, seconds, environ)
        (looked,) = self._results(["benchmarks.pairs.worker"], _LOOKING_RANKS, seconds, environ)
        return of_servers(found, ranks, looked["looks"])

    def _results(self, words: Sequence[str], ranks: int, seconds: float, environ: dict[str, str]) -> Any:
        return self._saved(words, ranks, seconds, environ)["launches"]

    def _saved(self, words: Sequence[str], ranks: int, seconds: float, environ: dict[str, str]) -> Any:
        """Run a module on so many ranks, and return what it has saved."""
        with tempfile.TemporaryDirectory(prefix="mpidist-pairs-") as folder:
            path = Path(folder, "found.json")
            start = ["-m", "mpidist", "run", "-n", str(ranks), "--quiet", "-m"]
            ended = self._run([*start, *words, "--seconds", str(seconds), "--save", str(path)], environ)
            if not path.exists():
                text = ended.stderr.strip()[-4000:]
                line = " ".join(words)
                raise LaunchError(f"{self.name}: {line} on {ranks} ranks ended with status {ended.returncode}:\n{text}")
            return json.loads(path.read_text())


def of_servers(found: dict[str, Any], ranks: int, looks: dict[str, int]) -> Launch:
    """Return the launch of the job of parameter servers; the cache mode is that of most looks behind it.  Local, pure.

    A row's reference is the step without slots.
    """
    rows, mode = [], max(looks, key=lambda mode: looks[mode])
    base = ONE, float(numpy.median(found["seconds"][ONE]))
    for work, seconds in found["seconds"].items():
        what = work, 4, "float32", "mpidist", "ours"
        rows.append(row_of(*what, seconds, base, wrong=found["wrong"][work], cache=mode))
    return Launch("ps", [], ranks, "", "1 node", looks, rows)
