"""Public names that are loaded on first use.

A module's stub is the one table of them: type checkers read it, and so does the module itself.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpidist.hints import missing_names

_IMPORT = re.compile(r"^from (\S+) import (\w+) as (\w+)$", re.MULTILINE)
_ALIAS = re.compile(r"^(\w+) = (\w+)$", re.MULTILINE)

#: Held while a name is loaded: threads that import modules of one package in different orders see half of them.
_LOADING = threading.RLock()


def lazy_names(module: str, path: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a module that has the imports and aliases of its stub."""
    stub = Path(path).with_suffix(".pyi").read_text()
    places = {name: (source, attribute) for source, attribute, name in _IMPORT.findall(stub)}
    places |= {alias: places[name] for alias, name in _ALIAS.findall(stub)}
    names = sorted(places)
    missing = missing_names(module)

    def load(name: str) -> Any:
        if name not in places:
            missing(name)
        source, attribute = places[name]
        with _LOADING:
            if source == module:  # a module of this package
                value = importlib.import_module(f"{source}.{attribute}")
            else:
                value = getattr(__import__(source, fromlist=[attribute]), attribute)
        setattr(sys.modules[module], name, value)
        return value

    return load, lambda: sorted(sys.modules[module].__all__), names
