"""The page of ``--show-site``: the defaults of a command, and the files that they come from."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.commands.quantities import table
from mpidist.jobs.site import NAME, Default, shown_path


def show(defaults: Mapping[str, Default], name: str) -> str:
    """Return the page for the table of that name."""
    if not defaults:
        return f"no defaults: there is no {NAME} with a table [{name}] here, nor in ~/.config/mpidist"
    rows = [(option, " | ".join(default.values), shown_path(default.file)) for option, default in defaults.items()]
    return table([("option", "value", "from"), *rows], left=(0, 1, 2))


def sources(used: Mapping[str, Default]) -> str:
    """Return which options came from which files, in one line."""
    files = dict.fromkeys(default.file for default in used.values())
    names = {file: ", ".join(name for name, default in used.items() if default.file == file) for file in files}
    return "; ".join(f"{shown_path(file)}: {names[file]}" for file in files)
