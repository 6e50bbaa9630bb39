"""Set-up of the tests with real JAX, PyTorch and Keras: that of the parallel tests.

``make test-frameworks`` makes an environment for all of them, and runs their tests there on 1 and 3 ranks.
"""

from __future__ import annotations

import os

# before JAX is loaded: one thread a rank, and programs that are compiled quickly: each runs once or twice
_XLA = [
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "intra_op_parallelism_threads=1",  # the last: what follows a word without dashes is not read
]
os.environ.setdefault("XLA_FLAGS", " ".join(_XLA))

from tests.parallel.conftest import pytest_addoption, pytest_configure  # noqa: E402

__all__ = ["pytest_addoption", "pytest_configure"]
