"""Files that are there whole, or as they were before: a full disk leaves no part of one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path

#: The errors of a file for which there is no room: on the disk, or within the user's quota.
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that has the name `path` once the block has ended; a device or a pipe is written as it is; local."""
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    path = path.resolve()  # a link stays one
    part = path.with_name(f".{path.name}.{os.urandom(16).hex()}.part")
    try:
        with open(part, "xb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
