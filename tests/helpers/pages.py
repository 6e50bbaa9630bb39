"""The pages of the documentation, and their Python examples.

Examples of a page of the guide, or of another page to paste from, belong together: `differences` runs them one after
another, as a reader types them, and compares what they print with what the page shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FROM_MPI4PY = ROOT / "docs" / "coming-from-mpi4py.md"
GUIDE = [FROM_MPI4PY, *(ROOT / "docs" / f"{name}.md" for name in ("guide", "strategies", "loops"))]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

_BLOCK = re.compile(
    r"(?:^<!-- run: (?P<how>\w+) -->\n)?^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)

_SESSION = re.compile(r"(?:^<!-- run: (?P<how>\w+) -->\n)?^```console\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A Python example: page and line, how it is run, its text, and what it prints, if that is shown."""

    page: Path
    line: int
    how: str | None
    code: str
    printed: str | None

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_part_of_page(self) -> bool:
        """Whether it goes on where the block before it ended."""
        return self.page in GUIDE and self.how is None


class Command(NamedTuple):
    """A command in a terminal session of a page: how it is run, its text on one line, and what it prints.

    A ``session`` is run as it stands, in the folder that has the page's files; of ``figures`` only the words count.
    """

    how: str | None
    text: str
    printed: str


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands that a page shows."""
    for session in _SESSION.finditer(page.read_text()):
        for part in re.split(r"^\$ ", session["text"].replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield Command(session["how"], command, printed)


def blocks() -> Iterator[Block]:
    """Yield the examples of all pages."""
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            yield Block(page, line, match["how"], match["code"], match["printed"])


def parts_of(page: Path) -> list[Block]:
    """Return the examples of a page of the guide that are run one after another."""
    return [block for block in blocks() if block.page == page and block.is_part_of_page]


def differences(page: Path) -> list[str]:
    """Run the examples of a page of the guide in one namespace; return where they print something else than is shown.

    On several ranks it is collective: every rank calls it.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for block in parts_of(page):
        printed = _printed(block, names)
        if printed != (block.printed or ""):
            found.append(f"{block.place} prints {printed!r}, but shows {block.printed!r}")
    return found


def _printed(block: Block, names: dict[str, Any]) -> str:
    """Run an example; return what it prints.  Ranks that are threads have namespaces, and so `print`s, of their own."""
    lines: list[str] = []
    names["print"] = lambda *values: lines.append(" ".join(map(str, values)) + "\n")
    code = "\n" * (block.line - 1) + block.code  # so that a traceback names the line of the page
    exec(compile(code, str(block.page), "exec"), names)
    return "".join(lines)
