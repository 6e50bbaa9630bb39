"""A log of the tests that ran, for processes that are no ranks."""

from __future__ import annotations

import pytest

from tests.helpers.ran_log import RanLog


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RanLog(config), "ran-log")
