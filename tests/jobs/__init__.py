"""Tests of whole jobs: each starts ranks in a subprocess, and runs on one rank itself."""

from __future__ import annotations

from tests.helpers.launch import (
    ROOT,
    JobResult,
    JobTimeout,
    environment,
    no_shared_memory_left,
    run_command,
    run_job,
    run_process,
)

__all__ = [
    "ROOT",
    "JobResult",
    "JobTimeout",
    "environment",
    "no_shared_memory_left",
    "run_command",
    "run_job",
    "run_process",
]
