"""Processes for examples of the documentation: each a fork of one in which NumPy and the like are loaded.

Of mpidist nothing is loaded before the fork: what an example uses of it, it has to import.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["numpy", "h5py", "difflib", "json", "mmap", "runpy", "secrets", "uuid"])

#: After so long a process that has not ended is killed.
_LIMIT_SECONDS = 120.0


def in_process(directory: Path, environ: dict[str, str], fn: Callable[..., Any], *args: Any) -> tuple[int | None, str]:
    """Call `fn` in a process of its own; return the exit status, None if it did not end, and all that it printed."""
    printed = directory / "printed.txt"
    process = _CONTEXT.Process(target=_call, args=(str(directory), str(printed), environ, fn, args))
    process.start()
    try:
        process.join(_LIMIT_SECONDS)
        status = process.exitcode
    finally:
        process.kill()
        process.join()
    return status, printed.read_text() if printed.exists() else ""


def _call(directory: str, printed: str, environ: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[:] = [""]
    fn(*args)


def alone(path: str) -> None:
    """Run a script, as Python does."""
    runpy.run_path(path, run_name="__main__")


def on_ranks(ranks: int, path: str) -> None:
    """Run a script on ranks that are threads."""
    from mpidist.testing import run_ranks

    code = compile(Path(path).read_text(), path, "exec")
    run_ranks(ranks, lambda: exec(code, {"__name__": "__main__"}))


def as_tests(path: str) -> None:
    """Run a module of tests."""
    import pytest

    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", path]))


def page_on_ranks(ranks: int, page: str) -> None:
    """Run a page of the guide, on ranks that are threads if there are any; exit with what it prints wrongly."""
    from mpidist.testing import run_ranks
    from tests.helpers.pages import differences

    found = run_ranks(ranks, differences, Path(page)) if ranks else [differences(Path(page))]
    sys.exit("\n".join(sum(found, [])) or 0)
