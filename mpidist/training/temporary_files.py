"""The names of unfinished files, and the files that killed processes have left.  All Local."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpidist.runtime.process_identity import ProcessIdentity

_END = ".partial"
#: A file of another machine counts as left when nobody has written to it for so long.
_FORGOTTEN_SECONDS = 3600.0


def temporary(path: Path) -> Path:
    """Return the name that a file has while this process writes it: no other process's."""
    return path.with_name(f".{path.name}.{ProcessIdentity.own().tag}{_END}")


def left_behind(directory: Path, is_name_fn: Callable[[str], Any], is_owned: bool = False) -> list[Path]:
    """Return the unfinished files of killed processes.  In an owned directory only this machine's processes write."""
    paths = []
    for path in directory.glob(f".*{_END}"):
        name, _, tag = path.name[1:].removesuffix(_END).rpartition(".")
        writer = ProcessIdentity.of_tag(tag)
        if writer is not None and is_name_fn(name) and _is_left(path, writer.lives, is_owned):
            paths.append(path)
    return paths


def _is_left(path: Path, lives: bool | None, is_owned: bool) -> bool:
    if lives is not None or is_owned:
        return not lives
    try:
        return time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS
    except FileNotFoundError:
        return False
