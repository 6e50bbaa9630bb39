"""``--site`` and ``--show-site``: the defaults of a command, and the page of the files that they come from."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Collection, Mapping
from pathlib import Path

from mpidist.commands.parser import Parser
from mpidist.commands.quantities import table
from mpidist.jobs.site import NAME, Default, read_site, shown_path, site_files


def add_site_options(parser: Parser) -> None:
    """Let a command have both options."""
    add = parser.add_argument
    add("--site", default=None, metavar="FILE", help=f"defaults from this file only, not from {NAME}; /dev/null: none")
    add("--show-site", action="store_true", default=False, help="print the defaults, and where they come from")


def given_defaults(
    given: Namespace, name: str, known: Collection[str], flags: Collection[str] = ()
) -> dict[str, Default] | None:
    """Return the defaults in the table of that name; None where they were to be printed.  See `read_site`."""
    defaults = read_site(site_files(os.environ, Path.cwd(), given.site), name, known, flags)
    if not given.show_site:
        return defaults
    rows = [(option, " | ".join(default.values), shown_path(default.file)) for option, default in defaults.items()]
    none = f"no defaults: there is no {NAME} with a table [{name}] here, nor in ~/.config/mpidist"
    print(table([("option", "value", "from"), *rows], left=(0, 1, 2)) if rows else none)
    return None


def sources(used: Mapping[str, Default]) -> str:
    """Return which options came from which files, in one line."""
    files = dict.fromkeys(default.file for default in used.values())
    names = {file: ", ".join(name for name, default in used.items() if default.file == file) for file in files}
    return "; ".join(f"{shown_path(file)}: {names[file]}" for file in files)
