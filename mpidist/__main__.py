"""``python -m mpidist`` is the ``mpidist`` command."""

from __future__ import annotations

import sys

from mpidist.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
