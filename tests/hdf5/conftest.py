"""Set-up of the tests with parallel HDF5: that of the parallel tests."""

from __future__ import annotations

from tests.parallel.conftest import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]
