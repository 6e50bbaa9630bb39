"""Syntax trees of sources, for the tests that look into the package's: each is parsed once."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source; nobody may change it."""
    return ast.parse(source)
