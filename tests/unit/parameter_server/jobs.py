"""Small jobs with parameter servers, whose ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpidist
from mpidist.testing import run_ranks


def job(fn: Callable[..., Any], ranks: int, *, timeout_seconds: float = 10, **arguments: Any) -> list[Any]:
    """Return what ``fn(strategy)`` returns on every rank that is no server, in rank order."""
    arguments.setdefault("num_ps", 1)

    def main() -> Any:
        result = fn(mpidist.ParameterServerStrategy(**arguments))
        return ("returned", result)

    return [found[1] for found in run_ranks(ranks, main, timeout_seconds=timeout_seconds) if found is not None]


def one_worker(fn: Callable[..., Any], servers: int = 1, **arguments: Any) -> Any:
    """Return what ``fn(strategy)`` returns on the one worker of a job with so many servers."""
    return job(fn, servers + 1, num_ps=servers, **arguments)[0]
