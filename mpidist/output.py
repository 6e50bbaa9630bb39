"""What a rank says on standard error: it stays in one piece between what other ranks say."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write lines, the last one ended here, to standard error by one write; local.

    What `print` writes is in two pieces, the text and the end of the line, where nothing is buffered
    (``PYTHONUNBUFFERED``) or the text has several lines: launchers then put words of another rank between them.
    """
    if sys.stderr is None:
        return
    sys.stderr.write(text if text.endswith("\n") else text + "\n")
    sys.stderr.flush()
