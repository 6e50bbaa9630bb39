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


def answer(command: Sequence[str], seconds: float, text: str | None = None) -> tuple[str, list[str]]:
    """Return what a program prints when it is given a text, and the lines that say why it failed, if it did.  Local."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, encoding="utf-8", errors="backslashreplace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "", [f"did not answer within {seconds:g} s"]
    except OSError as error:
        return "", [f"cannot be started: {error.strerror}"]
    faults = (done.stderr + done.stdout).strip().splitlines() or [f"status {done.returncode}"]
    return done.stdout, faults if done.returncode else []
