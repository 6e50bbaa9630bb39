"""TensorFlow's observed cases by topic, and our exceptions for its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Our exception for TensorFlow's, by the name in a case.
EXCEPTIONS: dict[str, type[Exception]] = {
    "InvalidArgumentError": ValueError,
    "JSONDecodeError": json.JSONDecodeError,
    "NotFoundError": ValueError,
    "NotImplementedError": NotImplementedError,
    "RuntimeError": RuntimeError,
    "TypeError": TypeError,
    "ValueError": ValueError,
}


def cases(topic: str) -> dict[str, dict[str, Any]]:
    """Return id -> case of one topic."""
    text = Path(__file__).with_name("tf_cases.json").read_text()
    return {case["id"]: case for case in json.loads(text)["cases"] if case["topic"] == topic}


def exception(expected: Any) -> type[Exception] | None:
    """Return our exception for the one that a case expects, None if it expects a value."""
    return EXCEPTIONS[expected["raises"]] if isinstance(expected, dict) and "raises" in expected else None
