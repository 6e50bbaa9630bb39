"""Set-up of the tests with real JAX, PyTorch and Keras: that of the parallel tests.

``make test-frameworks`` makes an environment for all of them, and runs their tests there on 1, 2 and 3 ranks.
"""

from __future__ import annotations

from tests.parallel.conftest import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]
