"""The batch script of a request: a template, filled in."""

from __future__ import annotations

import re
import shlex
from importlib import resources
from typing import Any

from mpidist.jobs.request import Request, places

#: The part of a path that bash replaces by somebody's home folder, if it is not in quotes.
_HOME = re.compile(r"~[\w.-]*/")
_MISSING = "job scripts are templates of jinja2, which is not installed: pip install jinja2"


def fill_in(request: Request, command_line: str, site: str = "") -> str:
    """Return the script; `command_line` and `site`, what came from a site file, stand in its header.

    ModuleNotFoundError, with the cure, where jinja2 is missing.
    """
    template = _environment().get_template(f"{request.scheduler}.sh")
    text: str = template.render(asked=request, command_line=command_line, site=site)
    return text


def _environment() -> Any:
    """Return jinja2 with the templates of this package."""
    try:
        import jinja2
    except ModuleNotFoundError:
        raise ModuleNotFoundError(_MISSING, name="jinja2") from None
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"word": word, "place": place, "clock": clock, "noted": noted}
    return environment


def _read(name: str) -> str | None:
    """Return the text of a template; from wherever the package is, a zip file too."""
    path = resources.files("mpidist.jobs") / "templates" / name
    return path.read_text("utf-8") if path.is_file() else None


def word(text: str) -> str:
    """Return an argument as one word of bash, with ``{folder}`` and so on as the script's variables."""
    parts = [f'"${part}"' if number % 2 else shlex.quote(part) for number, part in enumerate(places(text))]
    return "".join(part for part in parts if part != "''") or "''"


def place(path: str) -> str:
    """Return a path as one word of bash that replaces variables in it, and ``~`` at its beginning."""
    found = _HOME.match(path)
    home = found[0] if found else ""
    return f'{home}"{path[len(home) :]}"'


def clock(seconds: int) -> str:
    """Return ``04:00:00``."""
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def noted(line: str, note: str) -> str:
    """Return a line of the script with a comment behind it."""
    return f"{line:<35} # {note}"
