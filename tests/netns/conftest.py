"""The hosts that the tests of this folder share; they are skipped where there can be none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.ran_log import RanLog, add_option
from tests.jobs.conftest import pytest_terminal_summary
from tests.netns.hosts import Hosts, obstacle, several_hosts

__all__ = ["pytest_terminal_summary"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-netns", action="store_true", help="fail, not skip, where no hosts can be made")
    add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RanLog(config), "ran-log")


@pytest.fixture(scope="session")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two hosts for all tests of the session, with links of 100 Mbit/s."""
    if problem := obstacle():
        reason = f"no hosts on this machine: {problem}"
        if request.config.getoption("--require-netns"):
            pytest.fail(reason)
        pytest.skip(reason)
    with several_hosts() as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_of_ours_is_left(hosts: Hosts) -> Iterator[None]:
    """After every test, whatever happened in it, no host has anything of mpidist's in its shared memory."""
    yield
    for number in (1, 2):
        assert not [name for name in hosts.shared_memory(number) if "mpidist" in name]
