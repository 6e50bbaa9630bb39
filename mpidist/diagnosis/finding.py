"""A finding: one line about one thing, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

OK, WARN, FAIL = "ok", "warn", "FAIL"

#: From the best level to the worst.  A level's place is the exit status of a page whose worst finding it is.
LEVELS = (OK, WARN, FAIL)


@dataclass(frozen=True)
class Finding:
    """What a check says about one thing.

    `level` is one of `LEVELS`; `text` is what was seen; `cure` is the command that mends it, empty for what is well;
    `check` is the name of the check.
    """

    level: str
    text: str
    cure: str = ""
    check: str = ""

    def __post_init__(self) -> None:
        if (self.level == OK) == bool(self.cure):
            raise ValueError(f"a finding has a cure unless it is ok, got {self.level} {self.text!r} -> {self.cure!r}")

    def named(self, check: str) -> Finding:
        """Return this finding, of that check."""
        return replace(self, text=" ".join(self.text.split()), check=check)

    def __str__(self) -> str:
        cure = f"  -> {self.cure}" if self.cure else ""
        return f"{self.level:<5} {self.check}: {self.text}{cure}"


def ok(text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(OK, text)


def warn(text: str, cure: str) -> Finding:
    """Return a finding of what costs time, or may go wrong."""
    return Finding(WARN, text, cure)


def fail(text: str, cure: str) -> Finding:
    """Return a finding of what is broken."""
    return Finding(FAIL, text, cure)


def status(findings: Iterable[Finding]) -> int:
    """Return the exit status: 0 healthy, 1 warnings, 2 broken."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)
