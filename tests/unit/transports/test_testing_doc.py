"""The example in the docstring of mpidist.testing runs as it stands."""

import inspect
import textwrap

import numpy

import mpidist.testing


def test_the_example_of_the_docstring_runs():
    text = inspect.getdoc(mpidist.testing)
    assert text is not None
    lines = text.split("::\n", 1)[1].splitlines()
    end = next(number for number, line in enumerate(lines) if line and not line.startswith(" "))
    exec(textwrap.dedent("\n".join(lines[:end])), {"numpy": numpy})
