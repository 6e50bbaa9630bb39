"""The Python examples of README and docs run.

A Python block runs as it stands, each in a process of its own: alone, and on three ranks that are threads.  A comment
in the line above says when that is different: ``<!-- run: alone -->``, ``two`` or ``four`` for so many ranks, or
``pytest`` for a test module; those of ``keras``, ``keras_job`` and ``torch`` are run by `tests/frameworks`, and by
`tests/jobs` those of ``four_processes``, which no threads can be, and a ``file``, by the commands of its page.  The
blocks of a page of the guide are run one after another, in one namespace, and must print what is shown below them, on
every rank.
"""

from __future__ import annotations

import os
from functools import partial

import pytest

from mpidist.commands.launch.probe import without_launcher
from tests.helpers.example_processes import alone, as_tests, in_process, on_ranks, page_on_ranks
from tests.helpers.pages import FROM_MPI4PY, GUIDE, ROOT, blocks

#: How a block is run -> the functions that get the file it is in.
_RUNS = {
    None: (alone, partial(on_ranks, 3)),
    "alone": (alone,),
    "two": (partial(on_ranks, 2),),
    "four": (partial(on_ranks, 4),),
    "pytest": (as_tests,),
    "four_processes": (),
    "file": (),
    "keras": (),
    "keras_job": (),
    "torch": (),
}


@pytest.mark.parametrize(
    "block", [block for block in blocks() if not block.is_part_of_page], ids=lambda block: block.place
)
def test_every_example_runs(block, tmp_path):
    path = tmp_path / "test_example.py"
    path.write_text(block.code)
    for fn in _RUNS[block.how]:
        _run(block.place, tmp_path, fn, str(path))


#: Alone, and on three ranks that are threads, if the page asks no ranks of MPI: then tests/jobs has them.
_PAGES = [pytest.param(page, ranks, id=f"{page.stem}-{ranks}") for page in GUIDE for ranks in (0, 3)]


@pytest.mark.parametrize(("page", "ranks"), [each for each in _PAGES if each.values != (FROM_MPI4PY, 3)])
def test_a_page_of_the_guide_runs_and_prints_what_it_shows(page, ranks, tmp_path):
    _run(page.name, tmp_path, page_on_ranks, ranks, str(page))


def _run(place, directory, fn, *args):
    environ = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    status, printed = in_process(directory, environ, fn, *args)
    assert status == 0, f"{place} ended with {status}\n{printed}"


@pytest.mark.parametrize(
    "code", ["assert not 1", "import sys; sys.exit(3)", "mpidist", "import os; os.kill(os.getpid(), 9)"]
)
def test_an_example_that_fails_is_found(code, tmp_path):
    path = tmp_path / "test_example.py"
    path.write_text(code)
    with pytest.raises(AssertionError, match="docs.md:1 ended with"):
        _run("docs.md:1", tmp_path, alone, str(path))
