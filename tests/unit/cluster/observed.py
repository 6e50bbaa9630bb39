"""TensorFlow's observed cases of one topic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ORACLE = Path(__file__).parents[2] / "oracle" / "tf_cases.json"

#: Exceptions that TensorFlow raised, by the name in a case.
EXCEPTIONS: dict[str, type[Exception]] = {
    "JSONDecodeError": json.JSONDecodeError,
    "RuntimeError": RuntimeError,
    "TypeError": TypeError,
    "ValueError": ValueError,
}


def cases(topic: str) -> dict[str, dict[str, Any]]:
    """Return id -> case."""
    return {case["id"]: case for case in json.loads(ORACLE.read_text())["cases"] if case["topic"] == topic}


def exception(expected: Any) -> type[Exception] | None:
    """Return the exception that the expected value stands for, if any."""
    return EXCEPTIONS[expected["raises"]] if isinstance(expected, dict) and "raises" in expected else None
