"""The names of files while they are written, and what processes that were killed have left of them.  All Local."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpidist.runtime.process_identity import ProcessIdentity

_END = ".partial"
#: A file of a process that cannot be seen from here is left behind when it has not been written to for so long.
_FORGOTTEN_SECONDS = 3600.0


def temporary(path: Path) -> Path:
    """Return the name that a file has while this process writes it: no other process's."""
    return path.with_name(f".{path.name}.{ProcessIdentity.own().tag}{_END}")


def left_behind(directory: Path, is_name_fn: Callable[[str], Any], is_owned: bool = False) -> list[Path]:
    """Return what killed processes have left of files, also what earlier versions have."""
    found = []
    for path in directory.glob(f".*{_END}"):
        name, writer = _name_and_writer(path)
        if is_name_fn(name) and _is_left(path, writer, is_owned):
            found.append(path)
    return found


def _name_and_writer(path: Path) -> tuple[str, ProcessIdentity | None]:
    """Return what a file was to be called, and the process that wrote it; earlier versions did not say."""
    written = path.name[1:].removesuffix(_END)
    name, _, tag = written.rpartition(".")
    writer = ProcessIdentity.of_tag(tag)
    return (written, None) if writer is None else (name, writer)


def _is_left(path: Path, writer: ProcessIdentity | None, is_owned: bool) -> bool:
    lives = None if writer is None else writer.lives
    if lives is not None or is_owned:
        return not lives
    try:
        return time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS
    except FileNotFoundError:
        return False
