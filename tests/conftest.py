"""Set-up shared by all tests."""

from __future__ import annotations

import platform

import hypothesis
import numpy
import pytest

# derandomized, so that every rank of a parallel test draws the same examples, and a failure comes again;
# no deadline, because no test may depend on how busy the machine is
hypothesis.settings.register_profile("mpidist", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("mpidist")


def pytest_report_header(config: pytest.Config) -> str:
    return f"mpidist on Python {platform.python_version()}, NumPy {numpy.__version__}"
