"""The defaults that a site file gives to ``mpidist run``, below what its command line says."""

from __future__ import annotations

from argparse import Action, ArgumentTypeError, Namespace
from collections.abc import Mapping
from typing import Any

from mpidist.commands.parser import Parser
from mpidist.jobs.site import Default

#: Options that are of one command line only.
_NO_DEFAULTS = ("help", "site", "show_site", "dry_run", "module")

#: Options of which there can be one.
_RIVALS = {"hosts": "hostfile", "hostfile": "hosts", "tag": "log-dir", "log-dir": "tag"}

#: The option that names variables: those of the command line come on top of the file's.
_VARIABLES = "x"


def site_options(parser: Parser) -> dict[str, Action]:
    """Return the options that a file may have, by their longest names without dashes."""
    options = [action for action in parser.actions if action.option_strings and action.dest not in _NO_DEFAULTS]
    return {max(action.option_strings, key=len).lstrip("-"): action for action in options}


def flags(options: Mapping[str, Action]) -> set[str]:
    """Return the options that have no value."""
    return {name for name, action in options.items() if action.nargs == 0}


def used_defaults(
    given: Namespace, options: Mapping[str, Action], defaults: Mapping[str, Default]
) -> dict[str, Default]:
    """Return the defaults that count: the command line stands above them, and a stronger file above a weaker one."""
    on_line = {name for name, action in options.items() if hasattr(given, action.dest)}
    used: dict[str, Default] = {}
    for name, default in defaults.items():  # those of the strongest file last
        rival = _RIVALS.get(name, "")
        if rival in on_line or (name in on_line and name != _VARIABLES):
            continue
        if rival in used and _is_on(default) and _is_on(used[rival]):
            if used.pop(rival).file == default.file:
                raise ValueError(f"{default.file}: [run] has {rival} and {name}; expected one of them")
        used[name] = default
    return used


def fill_in(given: Namespace, options: Mapping[str, Action], defaults: Mapping[str, Default]) -> None:
    """Add defaults to what the command line gives; ValueError begins with the file of a bad value."""
    for name, default in defaults.items():
        destination = options[name].dest
        if name == _VARIABLES:
            setattr(given, destination, [*default.values, *getattr(given, destination, [])])
        else:
            setattr(given, destination, _value(name, options[name], default))


def _is_on(default: Default) -> bool:
    """Return whether an option counts; a flag may be turned off."""
    return default.values != ("false",)


def _value(name: str, action: Action, default: Default) -> Any:
    if len(default.values) != 1:
        raise ValueError(f"{default.file}: {name}: expected one value, got {len(default.values)}")
    if action.nargs == 0:
        return _is_on(default)
    try:
        return action.type(default.values[0]) if callable(action.type) else default.values[0]
    except ArgumentTypeError as error:
        raise ValueError(f"{default.file}: {name}: {error}") from None
