"""`given_path`: the directory or file that a user has named."""

from __future__ import annotations

import os
from pathlib import Path


def given_path(path: str | os.PathLike[str], parameter: str, *, is_file: bool = False) -> Path:
    """Return a path that was given for a parameter.  Local."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{parameter} must be a str or Path, got {type(path).__name__}")
    if not os.fspath(path).strip():
        raise ValueError(f"{parameter} is an empty path; name a {'file' if is_file else 'directory'}, as in 'run/1'")
    found = Path(path)
    if is_file and not found.name:
        raise ValueError(f"{parameter} must name a file, got {os.fspath(path)!r}")
    return found
