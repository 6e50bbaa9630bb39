"""What other programs say when they are asked."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def said(command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> str:
    """Return what a program prints, its errors last; nothing where it cannot be started, or takes longer.  Local."""
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
