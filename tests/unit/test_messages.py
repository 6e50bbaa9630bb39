"""The texts that users see are set with one space between sentences."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.parsed import parsed

PACKAGE = Path(__file__).resolve().parents[2] / "mpidist"


def wide_gaps(source: str) -> list[str]:
    """Return the string constants that have more than one space after a sentence; docstrings do not count."""
    tree = parsed(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text.value for text in texts if id(text) not in docstrings and re.search(r"[.:;!?]  ", text.value)]


def test_messages_have_single_spaces():
    found = {path.name: wide_gaps(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 50
    assert {name: gaps for name, gaps in found.items() if gaps} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [('"""One.  Two"""', 0), ('print("One.  Two")', 1), ('print(f"{x}.  Two")', 1), ('print("One. Two")', 0)],
)
def test_wide_gaps_are_found(source, count):
    assert len(wide_gaps(source)) == count
