"""The defaults of a site: the tables ``[job]`` and ``[run]`` of ``mpidist.toml``, for the commands of these names."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.hints import meant

NAME = "mpidist.toml"
#: The tables of a file, one for each command that takes defaults.
TABLES = ("job", "run")


@dataclass(frozen=True)
class Default:
    """The value of an option, as texts, and the file that it comes from; a list has one text for each entry."""

    values: tuple[str, ...]
    file: Path


def site_files(environ: Mapping[str, str], folder: Path, given: str | None = None) -> list[Path]:
    """Return the files that count, the strongest last: the one given, alone, else the user's and the folder's."""
    if given is not None:
        return [Path(given)]
    config = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/"), ".config"))
    return [path for path in (config / "mpidist" / NAME, folder / NAME) if path.is_file()]


def read_site(
    files: Collection[Path], table: str, known: Collection[str], flags: Collection[str] = ()
) -> dict[str, Default]:
    """Return the defaults in a table, by option; ValueError names the file, and the option that was perhaps meant.

    `known` are options without their dashes, ``gpus-per-node``; in a file ``gpus_per_node`` is the same.  `flags` are
    those of them that are true or false.  What the strongest file has comes last.
    """
    defaults: dict[str, Default] = {}
    for path in files:
        for key, value in _table(path, table).items():
            option = key.replace("_", "-")
            if option not in known:
                raise ValueError(f"{path}: [{table}] has no option {key!r}; {meant(option, known)}")
            defaults.pop(option, None)
            defaults[option] = Default(_texts(path, key, value, option in flags), path)
    return defaults


def _table(path: Path, name: str) -> dict[str, Any]:
    toml = _toml()
    try:
        document = toml.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected a file such as {NAME}") from None
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    for key, value in document.items():
        if key not in TABLES:
            raise ValueError(f"{path} has no table {key!r}; {meant(key, TABLES)}")
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {key!r} is {value!r}; expected a table that begins with the line [{key}]")
    table: dict[str, Any] = document.get(name, {})
    return table


def _texts(path: Path, key: str, value: Any, is_flag: bool) -> tuple[str, ...]:
    if is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"{path}: {key} = {value!r}; expected true or false")
        return (str(value).lower(),)
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in values):
        raise ValueError(f"{path}: {key} = {value!r}; expected a text, a number, or a list of texts")
    return tuple(map(str, values))


def _toml() -> Any:
    """Return the standard library's reader of TOML; before Python 3.11 the package that it was made of."""
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib
    try:
        import tomli
    except ModuleNotFoundError:
        raise ValueError(f"{NAME} cannot be read with Python 3.10 alone: pip install tomli") from None
    return tomli


def shown_path(path: Path) -> str:
    """Return a path as a person writes it, with ``~``."""
    home = os.path.expanduser("~")
    text = str(path)
    return f"~{text[len(home) :]}" if text.startswith(home + os.sep) else text
